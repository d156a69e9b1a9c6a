"""Which cores a cell gets."""

from __future__ import annotations

from gyre.serving.process import usable_cores


def test_a_cell_gets_the_cores_that_the_run_names() -> None:
    assert usable_cores([1], [0, 1], {0, 1, 2}) == [1]
    assert usable_cores([3, 2], [0, 1, 2, 3], set(range(8))) == [3, 2]
    assert usable_cores([], [], {4}) == []


def test_where_the_machine_grants_other_cores_cells_still_keep_apart() -> None:
    for allowed in ({4, 5}, {1, 4}, {0, 2}, {2, 9, 11}):
        first, second = (usable_cores([c], [0, 1], allowed) for c in (0, 1))
        assert first != second and set(first) | set(second) <= allowed


def test_one_core_is_shared() -> None:
    assert usable_cores([0], [0, 1], {0}) == usable_cores([1], [0, 1], {0}) == [0]
    assert usable_cores([0, 1], [0, 1], {7}) == [7]
