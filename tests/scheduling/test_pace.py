"""Whom rollouts that wait for their launch call back from training: nobody, where the backlog cannot wait for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.scheduling import CellView, ClusterView, ElasticPolicy, Pace, Rates, StepEnd, pace_of


def queued(pace: Pace | None, *, backlog: int = 10_000, live: int = 4, tail_s: float = 50.0) -> ClusterView:
    """Three of four cells train; one serves as many as it can, and 30 rollouts of the next step wait."""
    cells = tuple(CellView(f"c{i}", i == 0, "train" if i < 3 else "rollout", 4, 0 if i < 3 else live) for i in range(4))
    return ClusterView(cells, 30 + live, backlog, 2, 2, 0, Rates(100.0, 1.0, 2.0), tail_s, pace=pace)


def trainers(view: ClusterView) -> int:
    return sum(d.role == "train" for d in ElasticPolicy().decide(view).values())


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (queued(Pace(step_s=80.0, longest_s=100.0)), 2),  # 100 s of work; the cells have 4 * 20 s to spare
        (queued(Pace(step_s=75.0, longest_s=100.0)), 1),  # 4 * 25 s: it can wait, and central alone stays at it
        (queued(Pace(step_s=300.0, longest_s=100.0), backlog=500), 1),  # 5 s pay for one change of 3 s
        (queued(Pace(step_s=300.0, longest_s=100.0), live=5), 1),  # who is live comes first
        (queued(None), 1),
    ],
)
def test_trainers_stay_at_what_cannot_wait(seen: ClusterView, expected: int) -> None:
    assert trainers(seen) == expected


def test_no_more_than_half_of_the_cells_stay() -> None:
    rushed = Pace(step_s=300.0, longest_s=100.0)
    assert trainers(queued(rushed, backlog=10**6)) == 2
    two = replace(queued(rushed, backlog=10**6), cells=queued(None).cells[:1] + queued(None).cells[3:])
    assert trainers(two) == 1


def test_a_pace_needs_two_ends_and_forgets_old_ones() -> None:
    ends = [StepEnd(0.0, 99.0), StepEnd(10.0, 4.0), StepEnd(30.0, 6.0), StepEnd(32.0, 5.0)]
    assert pace_of(ends[:1]) is None
    assert pace_of(ends[:2]) == Pace(10.0, 4.0)
    assert pace_of(ends) == Pace(11.0, 6.0)


@given(st.lists(st.tuples(st.floats(0.1, 1e4), st.floats(0.0, 1e4)), min_size=2, max_size=6))
def test_steps_that_end_in_pairs_have_the_pace_of_both(steps: list[tuple[float, float]]) -> None:
    ends, now = [], 0.0
    for seconds, longest in steps:
        now += seconds
        ends.append(StepEnd(now, longest))
    pace = pace_of(ends)
    newest = steps[-2:] if len(steps) > 2 else steps[-1:]
    assert pace is not None and pace.step_s == pytest.approx(sum(s for s, _ in newest) / len(newest))
    assert pace.longest_s == max(longest for _, longest in newest)
