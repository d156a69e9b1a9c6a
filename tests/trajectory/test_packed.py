"""The layout of packed trees, against the tree itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.trajectory.packed import RowError, TreeRow, depth_first


@st.composite
def forests(draw: st.DrawFn) -> tuple[dict[int, int | None], dict[int, int]]:
    """Nodes -> parents in no order, and their lengths."""
    count = draw(st.integers(1, 12))
    names = draw(st.permutations(range(count)))
    above: dict[int, int | None] = {}
    for i in range(count):
        parent = draw(st.integers(-1, i - 1))
        above[names[i]] = None if parent < 0 else names[parent]
    order = draw(st.permutations(list(above)))
    return {n: above[n] for n in order}, {n: draw(st.integers(1, 5)) for n in order}


def path(parents: dict[int, int | None], node: int | None) -> list[int]:
    found = []
    while node is not None:
        found.append(node)
        node = parents[node]
    return found[::-1]


def row_of(parents: dict[int, int | None], lengths: dict[int, int]) -> tuple[list[int], TreeRow, TreeRow]:
    order = depth_first(parents)
    place = {n: i for i, n in enumerate(order)}
    above = [-1 if (p := parents[n]) is None else place[p] for n in order]
    sizes = [lengths[n] for n in order]
    return order, TreeRow(tuple(sizes), tuple(above)), TreeRow.joined(sizes, above)


@settings(max_examples=200, deadline=None)
@given(forests())
def test_a_token_attends_to_its_path_and_its_position_is_its_depth(forest):
    parents, lengths = forest
    order, row, joined = row_of(parents, lengths)
    owner = np.repeat(order, row.lengths)
    inside = np.concatenate([np.arange(n) for n in row.lengths])
    for same in (row, joined):
        mask, positions = same.mask(), same.positions()
        for t in range(same.tokens):
            above = path(parents, int(owner[t]))
            seen = [u for u in range(same.tokens) if owner[u] in above and (owner[u] != owner[t] or u <= t)]
            assert np.flatnonzero(mask[t]).tolist() == seen
            assert positions[t] == sum(lengths[n] for n in above[:-1]) + inside[t] == len(seen) - 1


@settings(max_examples=200, deadline=None)
@given(forests())
def test_joined_segments_end_only_where_the_tree_forks(forest):
    _, row, joined = row_of(*forest)
    children = [joined.parents.count(i) for i in range(len(joined.lengths))]
    assert all(n != 1 for n in children)
    assert joined.tokens == row.tokens
    assert TreeRow.joined(joined.lengths, joined.parents) == joined


def test_the_picture_in_the_docstring():
    row = TreeRow((4, 2, 3, 2, 3), (-1, 0, 1, 1, 0))
    assert row.starts == (0, 4, 6, 9, 11)
    assert row.ends == (14, 11, 9, 11, 14)
    assert row.positions().tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 6, 7, 4, 5, 6]


@pytest.mark.parametrize(
    ("lengths", "parents", "message"),
    [
        ((), (), "needs segments"),
        ((1, 2), (-1,), "needs segments"),
        ((3, 0), (-1, 0), "segment 1: length 0"),
        ((1,), (0,), "segment 0: its parent 0"),
        ((1, 1), (-1, 1), "segment 1: its parent 1"),
        ((1, 1, 1, 1), (-1, 0, 0, 1), "segment 3: its parent 1"),
        ((1, 1, 1), (-1, -1, 0), "segment 2: its parent 0"),
    ],
)
def test_what_is_no_row_is_refused(lengths, parents, message):
    for make in (TreeRow, TreeRow.joined):
        with pytest.raises(RowError, match=message):
            make(lengths, parents)


def test_depth_first_refuses_a_cycle():
    assert depth_first({1: None, 2: 1, 3: 9, 4: 1, 5: 2}) == [1, 2, 5, 4, 3]
    with pytest.raises(RowError, match="2 nodes hang on no root"):
        depth_first({1: None, 2: 3, 3: 2})
