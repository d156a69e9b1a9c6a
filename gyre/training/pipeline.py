"""A micro-batch cut into several, so that pipeline stages have something to do at the same time.

With n of them in a pipeline of P stages, n of n + P - 1 turns are used; with the whole row at once, one of P.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gyre.training.batch import PackedBatch
from gyre.trajectory.packed import TreeRow


def cut(batch: PackedBatch, most: int, *, whole_rollouts: bool) -> list[PackedBatch]:
    """At most `most` parts of whole trees, as equal in tokens as can be; none is empty of targets.

    What the loss takes together stays together: a sample's trees, and with `whole_rollouts` a rollout's. The parts'
    losses and gradients add up to those of the batch.
    """
    trees = _trees(batch.row)
    together = _joined(batch, trees, whole_rollouts)
    sizes = [sum(stop - start for start, stop in (trees[i] for i in group)) for group in together]
    count = min(most, len(together))
    if count < 2:
        return [batch]
    loads, parts = [0] * count, [list[int]() for _ in range(count)]
    for i in sorted(range(len(together)), key=lambda i: -sizes[i]):
        least = loads.index(min(loads))
        loads[least] += sizes[i]
        parts[least] += together[i]
    return [_part(batch, [trees[i] for i in sorted(part)]) for part in parts]


def _trees(row: TreeRow) -> list[tuple[int, int]]:
    """Row positions [start, stop) of each tree."""
    roots = [start for start, parent in zip(row.starts, row.parents, strict=True) if parent < 0]
    return list(zip(roots, [*roots[1:], row.tokens], strict=True))


def _joined(batch: PackedBatch, trees: list[tuple[int, int]], whole_rollouts: bool) -> list[list[int]]:
    """Trees in groups that a part takes or leaves. Trees without targets go with the first group."""
    tree = _tree_of(batch.positions[batch.predictors], trees)
    first: dict[int | str, int] = {}
    root = list(range(len(trees)))

    def find(i: int) -> int:
        while root[i] != i:
            i = root[i]
        return i

    for sample, place in sorted(set(zip(batch.sample.tolist(), tree.tolist(), strict=True))):
        key = batch.samples[sample].rollout_id if whole_rollouts else sample
        root[find(place)] = find(first.setdefault(key, place))
    with_targets = set(tree.tolist())
    for i in range(len(trees)):
        if i not in with_targets:
            root[find(i)] = find(min(with_targets))
    groups: dict[int, list[int]] = {}
    for i in range(len(trees)):
        groups.setdefault(find(i), []).append(i)
    return list(groups.values())


def _part(batch: PackedBatch, trees: list[tuple[int, int]]) -> PackedBatch:
    """The batch of these trees alone."""
    at = np.concatenate([np.arange(start, stop) for start, stop in trees])  # row positions that stay
    new_place = np.full(batch.row.tokens, -1, np.int64)
    new_place[at] = np.arange(len(at))
    segments = [i for i, start in enumerate(batch.row.starts) if new_place[start] >= 0]
    new_segment = {old: new for new, old in enumerate(segments)}
    positions = np.flatnonzero(new_place[batch.positions] >= 0)
    new_position = np.full(len(batch.positions), -1, np.int64)
    new_position[positions] = np.arange(len(positions))
    targets = np.flatnonzero(new_position[batch.predictors] >= 0)
    samples, sample = np.unique(batch.sample[targets], return_inverse=True)
    return PackedBatch(
        row=TreeRow(
            tuple(batch.row.lengths[i] for i in segments),
            tuple(new_segment.get(batch.row.parents[i], -1) for i in segments),
        ),
        ids=batch.ids[at],
        positions=new_place[batch.positions[positions]],
        temperatures=batch.temperatures[positions],
        predictors=new_position[batch.predictors[targets]],
        target_ids=batch.target_ids[targets],
        behaviour=batch.behaviour[targets],
        sample=sample.astype(np.int64),
        nodes=batch.nodes[targets],
        samples=tuple(batch.samples[i] for i in samples),
    )


def _tree_of(positions: NDArray[np.int64], trees: list[tuple[int, int]]) -> NDArray[np.int64]:
    return np.searchsorted(np.asarray([start for start, _ in trees]), positions, "right") - 1
