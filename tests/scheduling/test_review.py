"""When a policy is asked again though nobody reported, and what it makes of the caches of its cells."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.scheduling import CellView, ClusterView, ElasticPolicy, Phase, Rates, next_look_s
from gyre.scheduling.review import LEAST_S, MOST_S

RATES = Rates(100.0, 1.0, 2.0)


def view(roles: str, *, level: int = 1, backlog: int = 0, kv: int | None = None, context: int = 0) -> ClusterView:
    phases: dict[str, Phase] = {"s": "rollout", "t": "train", ">": "to_train", "<": "to_rollout"}
    cells = tuple(CellView(f"c{i}", i == 0, phases[r], 4, kv_tokens=kv) for i, r in enumerate(roles))
    return ClusterView(cells, level, backlog, 1, 1, 0, RATES, 40.0, context)


@pytest.mark.parametrize(
    ("seen", "after"),
    [
        (view("ss"), None),  # nothing to train: only a report can change that
        (view("ts", level=0, backlog=500), None),  # nobody is live: whoever can train does
        (replace(view("ts", backlog=500), steps_open=0), None),
        (view("ss", backlog=500), 10.0),  # a quarter of the tail
        (view("ts"), 10.0),  # an idle trainer may be wanted by the stragglers
        (view("ts", backlog=500), 5.0),  # the backlog will be gone
        (view("tts", backlog=500), 2.5),
        (view("t>s", backlog=100), LEAST_S),
        (replace(view("ts"), tail_s=None), MOST_S),
        (replace(view("ts", backlog=500), rates=None), 10.0),
    ],
)
def test_the_next_look(seen: ClusterView, after: float | None) -> None:
    assert next_look_s(seen) == after


@given(age=st.floats(0.0, 1e5))
def test_looks_grow_rarer_as_the_tail_grows_longer(age: float) -> None:
    """An hour with one straggler costs a few hundred looks, not thousands."""
    looks, now, seen = 0, 0.0, view("ts")
    while now < 3600.0:
        after = next_look_s(replace(seen, tail_s=(age + now) / 2))
        assert after is not None and LEAST_S <= after <= MOST_S
        now += after
        looks += 1
    assert looks <= 3600.0 / MOST_S + 60


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (view("ss", backlog=10**6, kv=800, context=711), "ts"),  # 800 >= 9/8 of 711
        (view("ss", backlog=10**6, kv=800, context=712), "ss"),
        (view("ss", backlog=10**6, context=10**9), "ts"),  # caches that nobody measured have room
        (view("ss", backlog=10**6, level=0, kv=1, context=10**9), "tt"),  # nobody is live: nothing to hold
        (view("stt", backlog=10**6, kv=800, context=900), "stt"),  # a little too much is not worth a change
        (view("stt", backlog=10**6, kv=800, context=901), "sts"),
        (view("stt", backlog=10**6, kv=800, context=2000), "sss"),
        (view("tst", backlog=10**6, kv=800, context=2000), "tss"),  # central stays while it has work
    ],
)
def test_contexts_are_room_too(seen: ClusterView, expected: str) -> None:
    decided = ElasticPolicy().decide(seen)
    assert "".join("s" if decided[c.name].role == "rollout" else "t" for c in seen.cells) == expected


@given(
    roles=st.text("st><", min_size=1, max_size=6),
    level=st.integers(1, 20),
    backlog=st.integers(0, 10**6),
    kv=st.integers(0, 1000),
    context=st.integers(0, 4000),
)
def test_who_leaves_leaves_enough_room(roles: str, level: int, backlog: int, kv: int, context: int) -> None:
    seen = view(roles, level=level, backlog=backlog, kv=kv, context=context)
    decided = ElasticPolicy().decide(seen)
    left = [c for c in seen.cells if c.role == "rollout" and decided[c.name].role == "train"]
    stay = [c for c in seen.cells if c.role == "rollout" and decided[c.name].role == "rollout"]
    if left:
        assert 4 * len(stay) >= level and kv * len(stay) >= context


@pytest.mark.parametrize(("backlog", "expected"), [(99, "sss"), (100, "tss"), (500, "tss"), (650, "tts")])
def test_central_goes_once_its_way_is_worth_it_and_satellites_when_both_ways_are(backlog: int, expected: str) -> None:
    """100 tokens/s, 1 s there, 2 s back: 100 tokens for the one that has to go in any case, 300 for each otherwise, and
    a tail of 3 s needs as many."""
    seen = replace(view("sss", backlog=backlog), tail_s=3.0)
    decided = ElasticPolicy().decide(seen)
    assert "".join("s" if decided[c.name].role == "rollout" else "t" for c in seen.cells) == expected
