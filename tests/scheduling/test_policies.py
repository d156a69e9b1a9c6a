"""Policies: single decisions, and whole runs under random durations, sizes and delays."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.scheduling import CellView, ClusterView, ElasticPolicy, Phase, Policy, make_policy
from tests.scheduling.world import World


def view(
    roles: str, *, level: int = 0, backlog: int = 0, groups: int = 1, closed: int = 0, steps: int = 1, size: int = 4
) -> ClusterView:
    """Cells by letter: s(erves), t(rains), > (on its way to training), < (on its way back); the first is central."""
    phases: dict[str, Phase] = {"s": "rollout", "t": "train", ">": "to_train", "<": "to_rollout"}
    cells = tuple(CellView(f"c{i}", i == 0, phases[letter], size) for i, letter in enumerate(roles))
    return ClusterView(cells, level, backlog, groups, steps, closed)


def roles(policy: Policy, seen: ClusterView) -> str:
    decided = policy.decide(seen)
    return "".join("s" if decided[c.name].role == "rollout" else "t" for c in seen.cells)


ELASTIC = ElasticPolicy(min_backlog_tokens=100)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (view("ss", level=8, backlog=900), "ss"),  # the other cell could not hold the level
        (view("ss", level=4, backlog=900), "ts"),  # it holds it exactly
        (view("sss", level=3, backlog=150), "tss"),  # central leaves first
        (view("ss", level=3, backlog=99), "ss"),  # not worth it yet
        (view("ss", level=3, backlog=99, closed=1), "ts"),  # but a closed step needs its optimizer step
        (view("ts", level=3, backlog=900), "ts"),  # one server always stays
        (view("ts", level=4, backlog=0), "ts"),  # no flapping: four slots hold four
        (view("ts", level=5, backlog=0), "ss"),  # the level rose
        (view("ts", level=5, backlog=1), "ts"),  # central stays while it has work and another serves
        (view("tt", level=1, backlog=900), "ts"),  # never without a server
        (view("t", level=1, backlog=900), "s"),
        (view("s", level=1, backlog=900), "s"),
        (view("s", level=0, backlog=0, groups=0, closed=1), "t"),
        (view("ssss", level=0, backlog=350), "ttts"),  # one more cell for every min_backlog_tokens
        (view("tsss", level=5, backlog=350), "ttss"),
        (view(">sss", level=0, backlog=150), "tsss"),  # one is on its way
        (view("sttt", level=0, backlog=150, closed=1), "tttt"),  # a satellite cannot take the optimizer step
        (view("tttt", level=0, backlog=0, groups=1), "tttt"),  # more groups will come
        (view("tttt", level=0, backlog=0, groups=0, steps=0), "ssss"),  # nothing to train
        (view("tttt", level=9, backlog=0, groups=0, steps=0), "ssss"),  # an evaluation
        (view("<sss", level=0, backlog=0, groups=0, closed=1), "tsss"),  # turned round; satellites have nothing to do
        (view("<ttt", level=6, backlog=900), "stts"),  # the largest name comes back first; the arriving cell counts
    ],
)
def test_elastic_decisions(seen: ClusterView, expected: str) -> None:
    assert roles(ELASTIC, seen) == expected


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (view("ss", level=1, backlog=900), "ss"),
        (view("ss", level=1, backlog=900, closed=1), "ss"),  # rollouts of the next step are live
        (view("ss", level=0, backlog=900, groups=0, closed=1), "tt"),
        (view("t>", level=5, backlog=900, closed=1), "tt"),  # the phase is over when its step is done
        (view("tt", level=5, groups=2), "ss"),
        (view("tt", level=0, groups=0), "ss"),
    ],
)
def test_colocate_decisions(seen: ClusterView, expected: str) -> None:
    assert roles(make_policy("colocate"), seen) == expected


def test_async_is_a_fixed_split() -> None:
    for seen in (view("sss", level=9), view("tst", backlog=500, closed=1)):
        assert roles(make_policy("async"), seen) == "tss"
        assert roles(make_policy("async", train_cells=["c0", "c2"]), seen) == "tst"


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="no policy is named 'best'; use elastic, colocate or async"):
        make_policy("best")


durations = st.lists(st.floats(0.1, 50.0), min_size=1, max_size=6)
whole_steps = st.lists(st.lists(durations, min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(["elastic", "colocate", "async"]),
    capacity=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    steps=whole_steps,
    staleness=st.integers(0, 2),
    window=st.integers(1, 30),
    switch_s=st.floats(0.0, 5.0),
    train_s=st.floats(0.01, 5.0),
    min_backlog=st.integers(0, 1000),
    seed=st.integers(0, 2**16),
)
def test_every_run_ends_and_is_never_under_served(
    name: str, capacity: list[int], steps: list[list[list[float]]], staleness: int, window: int, switch_s: float,
    train_s: float, min_backlog: int, seed: int,
) -> None:  # fmt: skip
    if name == "async" and len(capacity) == 1:
        capacity = [*capacity, 1]  # a fixed split needs two cells
    policy = make_policy(name, min_backlog_tokens=min_backlog)
    world = World(policy, capacity, steps, staleness, window, switch_s, train_s, random.Random(seed))
    world.run()
    if name == "elastic":
        assert world.under_served == []
        assert world.starved == []


@settings(max_examples=200, deadline=None)
@given(level=st.integers(0, 40), backlog=st.integers(0, 3000), groups=st.integers(0, 4), closed=st.integers(0, 2),
       cells=st.lists(st.tuples(st.sampled_from("st><"), st.integers(1, 9)), min_size=1, max_size=6))  # fmt: skip
def test_elastic_does_not_change_its_mind(
    level: int, backlog: int, groups: int, closed: int, cells: list[tuple[str, int]]
) -> None:
    """What it decides, it decides again when the cells have arrived and nothing else happened."""
    phases: dict[str, Phase] = {"s": "rollout", "t": "train", ">": "to_train", "<": "to_rollout"}
    seen = ClusterView(
        tuple(CellView(f"c{i}", i == 0, phases[p], size) for i, (p, size) in enumerate(cells)),
        level, backlog, groups, max(1, closed), closed,
    )  # fmt: skip
    for _ in range(len(cells) + 1):
        decided = ELASTIC.decide(seen)
        assert set(decided) == {c.name for c in seen.cells}
        arrived = tuple(CellView(c.name, c.central, decided[c.name].role, c.max_running) for c in seen.cells)
        settled = ClusterView(arrived, level, backlog, groups, max(1, closed), closed)
        for before, after in zip(seen.cells, ELASTIC.decide(settled).items(), strict=True):
            # No cell goes back at once. A second wave may follow, once the first has arrived.
            if decided[before.name].role != before.heading:
                assert after[1].role == decided[before.name].role
        seen = settled
    assert roles(ELASTIC, seen) == "".join("s" if c.role == "rollout" else "t" for c in seen.cells)


def test_elastic_trains_while_it_serves() -> None:
    """A long tail: with elastic the backlog is trained before the last rollout ends; with colocate after it."""

    def wall(name: str) -> float:
        steps = [[[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 60.0]]]
        policy = make_policy(name, min_backlog_tokens=100)
        world = World(policy, [4, 4], steps, 0, 8, 0.5, 10.0, _Always())
        world.run()
        return world.now

    assert wall("elastic") < wall("colocate") - 15


class _Always(random.Random):
    """Every group gives a gradient; every duration is its mean."""

    def choice(self, options):  # type: ignore[no-untyped-def]
        return options[-1]

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2
