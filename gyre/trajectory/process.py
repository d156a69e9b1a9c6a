"""From a rollout's tree to bounded, deduplicated samples, and from samples to micro-batches. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
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


def micro_batches(
    samples: Sequence[tuple[Hashable, int]], budget: int, *, whole_rollouts: bool = False
) -> list[list[int]]:
    """Pack samples, given as (rollout, n_tokens), into micro-batches of at most `budget` tokens. Returns indices.

    Samples of one rollout stay together where they fit together, so that a shared prefix can be computed once; a
    sample above the budget is a micro-batch of its own, and with `whole_rollouts` so is a rollout above it.
    First-fit decreasing, and deterministic.
    Raises ValueError for a budget below 1.
    """
    if budget < 1:
        raise ValueError(f"budget: must be at least 1 token, got {budget}")
    by_rollout: dict[Hashable, list[int]] = {}
    for index, (rollout, _) in enumerate(samples):
        by_rollout.setdefault(rollout, []).append(index)
    size = [n for _, n in samples]
    units: list[list[int]] = []
    for members in by_rollout.values():
        fits = whole_rollouts or sum(size[i] for i in members) <= budget
        units += [members] if fits else _first_fit([[i] for i in members], size, budget)
    return _first_fit(units, size, budget)


def _first_fit(units: list[list[int]], size: list[int], budget: int) -> list[list[int]]:
    weight = {id(unit): sum(size[i] for i in unit) for unit in units}
    bins: list[list[int]] = []
    room: list[int] = []
    for unit in sorted(units, key=lambda unit: -weight[id(unit)]):
        place = next((b for b, free in enumerate(room) if weight[id(unit)] <= free), None)
        if place is None:
            bins.append([])
            room.append(budget)
            place = len(bins) - 1
        bins[place] += unit
        room[place] -= weight[id(unit)]
    return bins
