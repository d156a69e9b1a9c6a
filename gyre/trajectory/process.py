"""From a rollout's tree to bounded, deduplicated samples. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre.trajectory.tree import KIND_RANK, Branch, Node, Tree


@dataclass(frozen=True)
class BranchSample:
    """A branch that is trained. Its targets are the tokens of `owned_nodes` (generated nodes of its path)."""

    branch: Branch
    rank: int
    owned_nodes: tuple[int, ...]
    n_targets: int


def select(tree: Tree, branch_cap: int) -> list[BranchSample]:
    """At most `branch_cap` branches; each trainable token of a kept branch is owned by the first kept one that has it.

    One branch is taken after the other. Next is always the one whose not yet owned tokens hold the best kind
    (`KIND_RANK`); among equals the one whose leaf has the better kind, then the one with more tokens not yet owned,
    then the older leaf. So a compaction call at the end of the main conversation carries that conversation, and only
    what it adds ranks as `main-summary` when the conversation goes on elsewhere. Tokens of auxiliary and incomplete
    calls are context at most. Raises ValueError for a cap below 1.
    """
    if branch_cap < 1:
        raise ValueError(f"branch_cap: must be at least 1, got {branch_cap}")
    left = tree.branches()
    owned: set[int] = set()
    kept: list[BranchSample] = []

    def order(branch: Branch) -> tuple[int, int, int, int]:
        new = [n for n in branch.nodes if n.trainable and n.id not in owned]
        best = min(KIND_RANK[n.kind] for n in new)  # never empty: nothing but the branch itself contains its leaf
        return best, KIND_RANK[branch.kind], -sum(n.length for n in new), branch.leaf_id

    while left and len(kept) < branch_cap:
        branch = min(left, key=order)
        left.remove(branch)
        new = [n for n in branch.nodes if n.trainable and n.id not in owned]
        owned.update(n.id for n in new)
        kept.append(BranchSample(branch, len(kept), tuple(n.id for n in new), sum(n.length for n in new)))
    return kept


def target_mask(nodes: Sequence[Node], owned_nodes: Collection[int]) -> NDArray[np.bool_]:
    """bool [n_tokens]: which tokens of a path (root to leaf) are targets, that is, lie in an owned node."""
    owned = set(owned_nodes)
    return np.repeat([n.id in owned for n in nodes], [n.length for n in nodes])
