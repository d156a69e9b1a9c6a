"""Slots that serve several rollouts: cells leave earlier, and only for `elastic` does it matter."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gyre.scheduling import CellView, ClusterView, ElasticPolicy, Roomy, with_room

VIEW = ClusterView(
    tuple(CellView(f"c{i}", i == 0, "rollout", 4) for i in range(4)), water_level=60, backlog_tokens=1000,
    open_groups=1, steps_open=2, steps_closed=0,
)  # fmt: skip


def trainers(view: ClusterView, rollouts_per_slot: float, window: int | None) -> int:
    decided = Roomy(ElasticPolicy(min_backlog_tokens=100), rollouts_per_slot, window).decide(view)
    return sum(decision.role == "train" for decision in decided.values())


def test_cells_leave_when_what_may_be_under_way_needs_fewer_slots() -> None:
    assert trainers(VIEW, 1, 16) == 0  # 60 rollouts, 16 slots
    assert trainers(VIEW, 2, None) == 0  # 32 places
    assert trainers(VIEW, 2, 16) == 2  # 16 rollouts at a time: two cells have 16 places for them
    assert trainers(replace(VIEW, water_level=7), 2, 16) == 3


@given(st.integers(0, 200), st.floats(1, 4), st.integers(1, 100))
def test_a_view_with_room_holds_no_more_rollouts_than_the_window_and_one_slot_a_rollout_changes_nothing(
    level: int, more: float, window: int
) -> None:
    view = replace(VIEW, water_level=level)
    assert with_room(view, 1, window) is view
    roomy = with_room(view, more, window)
    assert roomy.water_level == level if more == 1 else roomy.water_level == min(level, window)
    assert all(4 <= c.max_running <= round(4 * more) for c in roomy.cells)
