"""Spans of token ids in a tree: what a rollout's prompts and answers are stored as. Each distinct prefix is there once.

A prompt that shares its beginning with a prompt that is there already cuts that one in two, so that both hang below
the shared part. What was sampled is never cut, and no id on any path ever changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

MIN_SHARED = 16
"""Tokens that two prompts must share before a node is cut for it: a row costs about as much as so many tokens."""


@dataclass(slots=True, eq=False)
class Node:
    """A span of token ids under its parent. Its ids never change; a prompt may be cut (`Nodes.cut`)."""

    id: int
    parent: Node | None
    start: int
    ids: Ids
    generated: bool = False
    children: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids.flags.writeable = False

    @property
    def end(self) -> int:
        """Depth just after its last token."""
        return self.start + len(self.ids)

    def path(self) -> list[Node]:
        """The nodes from the root to this one."""
        out: list[Node] = []
        node: Node | None = self
        while node is not None:
            out.append(node)
            node = node.parent
        out.reverse()
        return out

    def tokens(self) -> Ids:
        """The ids from the root to the end of this node, int32[end]."""
        return np.concatenate([n.ids for n in self.path()])

    def follows(self) -> Node | None:
        """The generated node that the prompt ending here goes on from; None where the prompt begins at the root."""
        node = self.parent
        while node is not None and not node.generated:
            node = node.parent
        return node


@dataclass(frozen=True, slots=True)
class Place:
    """Where a prompt belongs: after the first `at` tokens of `node` (None: at the root), of which `cut` says whether
    more follow. `shared` of the prompt's new ids are there already."""

    node: Node | None
    at: int
    shared: int

    @property
    def cut(self) -> bool:
        """Whether `node` must be cut."""
        return self.node is not None and self.at < len(self.node.ids)


class Nodes:
    """All spans of one rollout that a prompt may share: complete answers, and every prompt."""

    def __init__(self) -> None:
        self.roots: list[Node] = []

    def add(self, node: Node) -> Node:
        """Hang a node under its parent."""
        (self.roots if node.parent is None else node.parent.children).append(node)
        return node

    def place(self, anchor: Node | None, ids: Ids) -> Place:
        """Where a prompt that continues `anchor` by `ids` (at least one) shares most of what is there.

        Where all of `ids` are there, the place is the end of a prompt, or would be after its cut.
        """
        node, done = anchor, 0
        while True:
            rest = ids[done:]
            best, length = None, 0
            for child in self.roots if node is None else node.children:
                if child.ids[0] == rest[0] and (n := shared(child.ids, rest)) > length:
                    best, length = child, n
            if best is None:
                return Place(node, 0 if node is None else len(node.ids), done)
            if best.generated and (length < len(best.ids) or length == len(rest)):
                return Place(node, 0 if node is None else len(node.ids), done)
            if length < len(best.ids):
                if length < MIN_SHARED:
                    return Place(node, 0 if node is None else len(node.ids), done)
                return Place(best, length, done + length)
            node, done = best, done + length
            if done == len(ids):
                return Place(node, len(node.ids), done)

    def cut(self, node: Node, at: int, new_id: int) -> Node:
        """Cut a prompt after its first `at` tokens; returns the first part, which has the id `new_id`.

        `node` keeps its id, its children, and the rest of its ids: whoever holds it still holds the end of its prompt.
        """
        if node.generated or not 0 < at < len(node.ids):
            raise ValueError(f"node {node.id} cannot be cut at {at}: it must be a prompt with more tokens than that")
        head = Node(new_id, node.parent, node.start, node.ids[:at], children=[node])
        siblings = self.roots if node.parent is None else node.parent.children
        siblings[siblings.index(node)] = head
        node.parent, node.start, node.ids = head, node.start + at, node.ids[at:]
        return head


def shared(a: Ids, b: Ids) -> int:
    """How many ids `a` and `b` have in common at their beginning."""
    n = min(len(a), len(b))
    done, step = 0, 64
    while done < n:
        end = min(n, done + step)
        different = a[done:end] != b[done:end]
        if different.any():
            return done + int(different.argmax())
        done, step = end, step * 16
    return n


def of_rows(
    rows: Iterable[tuple[int, int | None, int, Ids, bool]], kept: Sequence[int]
) -> tuple[Nodes, dict[int, Node]]:
    """The nodes of rows (id, parent, start, ids, generated), parents first. Of generated ones, `kept` are shared."""
    nodes, good = Nodes(), set(kept)
    by_id: dict[int, Node] = {}
    for node_id, parent, start, ids, generated in rows:
        node = Node(node_id, None if parent is None else by_id[parent], start, ids, generated)
        by_id[node_id] = node
        if not generated or node_id in good:
            nodes.add(node)
    return nodes, by_id
