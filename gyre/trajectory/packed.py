"""Trees laid into one row of tokens, each distinct node once. No tokens here, no torch: lengths and who follows whom.

A row is a list of segments, depth first:

    tree:  A ─┬─ B ─┬─ C        row:  A A A A B B C C C D D E E E
              │     └─ D        depth 0 1 2 3 4 5 6 7 8 6 7 4 5 6
              └─ E

A token's position is its depth in its tree, and it attends to what lies above it: its ancestors' tokens and, of its
own segment, those up to itself. Depth first means that whatever attends to a segment's end lies in one range right
behind it (`ends`), so the whole mask is `key <= query < ends[key's segment]`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Key = TypeVar("Key", bound=Hashable)


class RowError(ValueError):
    """The segments do not form trees laid depth first; the message names the segment."""


@dataclass(frozen=True)
class TreeRow:
    """Segments of one row. `lengths` [S] are in tokens; `parents` [S] is the segment that each one continues, -1 for
    the beginning of a tree. Raises RowError for an empty segment or row, and for an order that is not depth first."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]

    @staticmethod
    def sequences(lengths: Sequence[int]) -> TreeRow:
        """Separate sequences, one after another."""
        return TreeRow(tuple(lengths), (-1,) * len(lengths))

    @staticmethod
    def joined(lengths: Sequence[int], parents: Sequence[int]) -> TreeRow:
        """The same row in as few segments as can be: an only child becomes part of its parent.

        A call costs attention one segment only where the tree forks. Token positions in the row do not change.
        """
        TreeRow(tuple(lengths), tuple(parents))  # check what was given
        children = np.bincount(np.asarray([p for p in parents if p >= 0], np.int64), minlength=len(lengths))
        new: list[int] = []
        place: list[int] = []
        above: list[int] = []
        for index, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
            if parent >= 0 and parent == index - 1 and children[parent] == 1:
                new[-1] += length
            else:
                new.append(length)
                above.append(-1 if parent < 0 else place[parent])
            place.append(len(new) - 1)
        return TreeRow(tuple(new), tuple(above))

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.parents):
            raise RowError(f"a row needs segments, got {len(self.lengths)} lengths and {len(self.parents)} parents")
        path: list[int] = []
        for index, (length, parent) in enumerate(zip(self.lengths, self.parents, strict=True)):
            if length < 1:
                raise RowError(f"segment {index}: length {length}, must be at least one token")
            while path and path[-1] != parent:
                path.pop()
            if parent != (path[-1] if path else -1):
                raise RowError(f"segment {index}: its parent {parent} does not lie above it in depth-first order")
            path.append(index)

    @property
    def tokens(self) -> int:
        """T, the length of the row."""
        return self.starts[-1] + self.lengths[-1]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Row position of each segment's first token [S]."""
        return tuple(int(x) for x in np.cumsum((0, *self.lengths[:-1])))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Tokens above each segment in its tree [S]: the position of its first token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + self.lengths[parent])
        return tuple(depths)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Row position where the segments below each segment end [S]; its own end where there are none."""
        ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        for index in range(len(ends) - 1, -1, -1):
            if (parent := self.parents[index]) >= 0:
                ends[parent] = max(ends[parent], ends[index])
        return tuple(ends)

    def positions(self) -> NDArray[np.int64]:
        """Depth of every token in its tree, int64 [T]."""
        shift = np.asarray(self.depths, np.int64) - np.asarray(self.starts, np.int64)
        return np.arange(self.tokens) + np.repeat(shift, self.lengths)

    def reach(self) -> NDArray[np.int64]:
        """For every token the row position before which it can be attended to, int64 [T]: `ends` of its segment."""
        return np.repeat(np.asarray(self.ends, np.int64), self.lengths)

    def mask(self) -> NDArray[np.bool_]:
        """bool [T, T], who (row) attends to whom (column): for tests, and for reading."""
        at = np.arange(self.tokens)
        return (at[None, :] <= at[:, None]) & (at[:, None] < self.reach()[None, :])


def depth_first(parents: Mapping[Key, Key | None]) -> list[Key]:
    """Nodes, given as node -> parent, so that each one's descendants follow it at once; siblings in the given order.

    A parent that is not a key counts as none. Raises RowError for a cycle.
    """
    below: dict[Key | None, list[Key]] = {}
    for node, parent in parents.items():
        below.setdefault(parent if parent in parents else None, []).append(node)
    order: list[Key] = []
    stack = below.get(None, [])[::-1]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += below.get(node, [])[::-1]
    if len(order) != len(parents):
        raise RowError(f"{len(parents) - len(order)} nodes hang on no root")
    return order
