"""A rollout's tree of token spans, and the branches in it. Pure data: tokens themselves stay in the database."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

KIND_RANK = {"main": 0, "main-summary": 1, "sub-agent": 2, "sub-agent-summary": 3}
"""Kinds of branch that are trained, best first. `auxiliary` is recorded and never trained."""


class TreeError(ValueError):
    """The rows do not form a tree of token spans."""


@dataclass(frozen=True)
class Node:
    """A span of `length` tokens that begins at depth `start` (in tokens) below its parent.

    `kind` and `complete` tell of the call that generated it; a prompt's are not looked at.
    """

    id: int
    parent_id: int | None
    generated: bool
    start: int
    length: int
    kind: str = "main"
    complete: bool = True

    @property
    def trainable(self) -> bool:
        """Sampled by the policy, delivered whole to the harness, and of a kind that is trained."""
        return self.generated and self.complete and self.kind in KIND_RANK


@dataclass(frozen=True)
class Branch:
    """A path from a root to a leaf, both included. `kind` is that of the call that generated the leaf."""

    leaf_id: int
    kind: str
    nodes: tuple[Node, ...]

    @property
    def n_tokens(self) -> int:
        """Length of the path in tokens."""
        return self.nodes[-1].start + self.nodes[-1].length


@dataclass(frozen=True)
class Tree:
    """All nodes of one rollout (a forest when the harness began more than one conversation), in order of ids."""

    nodes: dict[int, Node] = field(default_factory=dict)

    @staticmethod
    def of(nodes: Iterable[Node]) -> Tree:
        """A checked tree. Raises TreeError naming the node that does not fit."""
        by_id = {n.id: n for n in sorted(nodes, key=lambda n: n.id)}
        for node in by_id.values():
            _check(node, by_id)
        return Tree(by_id)

    def path(self, node_id: int) -> tuple[Node, ...]:
        """Nodes from the root to `node_id`."""
        path = []
        at: int | None = node_id
        while at is not None:
            path.append(self.nodes[at])
            at = self.nodes[at].parent_id
        return tuple(reversed(path))

    def branches(self) -> list[Branch]:
        """One branch for each trainable node that no trainable node continues, in order of ids.

        Auxiliary and incomplete continuations are not seen: what they hang on is a leaf as if they were not there.
        """
        inner: set[int] = set()
        for node in self.nodes.values():
            if node.trainable:
                at = node.parent_id
                while at is not None and at not in inner:
                    inner.add(at)
                    at = self.nodes[at].parent_id
        leaves = [n for n in self.nodes.values() if n.trainable and n.id not in inner]
        return [Branch(n.id, n.kind, self.path(n.id)) for n in leaves]


def _check(node: Node, by_id: dict[int, Node]) -> None:
    if node.length < 1:
        raise TreeError(f"node {node.id}: length {node.length}, must be at least 1")
    if node.parent_id is None:
        if node.start != 0 or node.generated:
            raise TreeError(f"node {node.id}: a root must be a prompt that starts at 0")
        return
    parent = by_id.get(node.parent_id)
    if parent is None:
        raise TreeError(f"node {node.id}: its parent {node.parent_id} is not in the tree")
    # A child begins where its parent ends, so depths grow along a path and no cycle can pass this check.
    if node.start != parent.start + parent.length:
        raise TreeError(
            f"node {node.id}: starts at {node.start}, its parent {parent.id} ends at {parent.start + parent.length}"
        )
