"""Where a cell's time went, from its rows."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.elastic.reading import STATES, _covered, _of_cell


def change(to_role: str, began: float, ended: float | None) -> Any:
    return {"to_role": to_role, "began": began, "ended": ended}


def test_a_cells_time_is_dealt_to_its_states() -> None:
    busy = {"serve": [(-5.0, 2.0), (1.0, 4.0), (6.0, 7.0)], "train": [(12.0, 15.0)], "optimizer": [(16.0, 17.0)]}
    changes = [change("train", 8.0, 10.0), change("rollout", 18.0, 19.5)]
    found = _of_cell(changes, busy, 0.0, 25.0)
    assert found == {
        "serve": 5.0, "serve idle": 3.0 + 5.5, "to train": 2.0, "train": 3.0, "train idle": 4.0, "optimizer": 1.0,
        "to rollout": 1.5,
    }  # fmt: skip
    assert sum(found.values()) == 25.0


def test_a_change_that_has_not_ended_lasts_to_the_end() -> None:
    nothing: dict[str, Any] = {"serve": [], "train": [], "optimizer": []}
    found = _of_cell([change("train", 3.0, None)], nothing, 0.0, 10.0)
    assert {state: s for state, s in found.items() if s} == {"serve idle": 3.0, "to train": 7.0}
    assert set(found) == set(STATES)


SPANS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda ab: (min(ab), max(ab))), max_size=12)


@given(SPANS, st.integers(0, 50), st.integers(0, 50))
def test_what_intervals_cover_is_counted_once(spans: list[tuple[int, int]], a: int, b: int) -> None:
    begin, end = min(a, b), max(a, b)
    seconds = sum(any(s <= t and t + 1 <= e for s, e in spans) for t in range(begin, end))
    assert _covered(cast(Any, spans), begin, end) == seconds
