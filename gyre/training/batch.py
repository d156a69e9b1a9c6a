"""A micro-batch from the database's bytes to one row of packed trees: tokens are buffers all the way, never lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre.store.queries import MicroBatchRows, NodeRow, SampleRow
from gyre.store.tokens import unpack_ids, unpack_logprobs
from gyre.trajectory.packed import TreeRow, depth_first


class BatchError(ValueError):
    """A sample that cannot be trained; the message names the sample and its rollout."""


@dataclass(frozen=True)
class TrainSample:
    """A branch alone with its targets, as tests and measurements make it. `targets` int64 [m] are positions in the
    branch; `behaviour` [m] their log-probs under the policy that sampled them, at `temperature`."""

    rollout_id: str
    ids: NDArray[np.int32]
    targets: NDArray[np.int64]
    behaviour: NDArray[np.float32]
    advantage: float
    rollout_targets: int
    """N_r: targets of the rollout over all its samples."""
    temperature: float = 1.0


@dataclass(frozen=True)
class SampleHead:
    """What the objective knows of a sample besides its tokens. `n_tokens` is the length of its branch."""

    rollout_id: str
    n_tokens: int
    n_targets: int
    advantage: float
    rollout_targets: int


@dataclass(frozen=True)
class PackedBatch:
    """One row of packed trees with its targets.

    `ids` int64 [T]. `positions` int64 [P] are the row positions that predict targets, each once and ascending, and
    `temperatures` [P] those of sampling there. Target n of N, in the order of their predictors: `predictors` int64 [N]
    is its index into `positions`, `target_ids` its token, `behaviour` its log-prob under the policy that sampled it,
    `sample` int64 [N] the index of the sample that owns it, `nodes` int64 [N] the row of its node (-1: it has none).
    """

    row: TreeRow
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    temperatures: NDArray[np.float32]
    predictors: NDArray[np.int64]
    target_ids: NDArray[np.int64]
    behaviour: NDArray[np.float32]
    sample: NDArray[np.int64]
    nodes: NDArray[np.int64]
    samples: tuple[SampleHead, ...]


def pack_rows(rows: MicroBatchRows) -> PackedBatch:
    """A micro-batch's trees with every distinct node once. Raises BatchError where the rows contradict each other."""
    if not rows.samples:
        raise BatchError("a micro-batch needs at least one sample")
    nodes = {n.id: n for n in rows.nodes}
    order = depth_first({n.id: n.parent_id for n in rows.nodes})
    place = {node: i for i, node in enumerate(order)}
    lengths = [nodes[i].length for i in order]
    starts = np.cumsum((0, *lengths))
    parents = [-1 if (p := nodes[i].parent_id) is None else place.get(p, -1) for i in order]
    ids = np.empty(starts[-1], np.int64)
    for i, node_id in enumerate(order):
        span = unpack_ids(nodes[node_id].token_ids)
        if len(span) != lengths[i]:
            where = f"node {node_id} of rollout {nodes[node_id].rollout_id}"
            raise BatchError(f"{where}: {len(span)} tokens, its row says {lengths[i]}")
        ids[starts[i] : starts[i + 1]] = span
    before: list[NDArray[np.int64]] = []
    tokens: list[NDArray[np.int64]] = []
    behaviour: list[NDArray[np.float32]] = []
    counts: list[int] = []
    owners: list[NDArray[np.int64]] = []
    for sample in rows.samples:
        owned = _owned(sample, nodes)
        for node in owned:
            i = place[node.id]
            first = int(starts[i])
            # The token before each target; before the node's first one lies its parent's last, which may be far away.
            predictors = np.arange(first - 1, first + node.length - 1)
            predictors[0] = starts[parents[i] + 1] - 1
            before.append(predictors)
            tokens.append(ids[first : first + node.length])
            behaviour.append(_behaviour(sample, node))
            owners.append(np.full(node.length, node.id, np.int64))
        counts.append(sum(node.length for node in owned))
    return _batch(
        TreeRow.joined(lengths, parents),
        ids,
        np.concatenate(before),
        np.concatenate(tokens),
        np.concatenate(behaviour),
        np.repeat(np.arange(len(counts)), counts),
        np.concatenate(owners),
        [s.temperature for s in rows.samples],
        [SampleHead(s.rollout_id, s.n_tokens, s.n_targets, s.advantage, s.rollout_targets) for s in rows.samples],
    )


def _owned(sample: SampleRow, nodes: dict[int, NodeRow]) -> list[NodeRow]:
    """The nodes whose tokens are the sample's targets, root first."""

    def wrong(what: str) -> BatchError:
        return BatchError(f"sample {sample.id} of rollout {sample.rollout_id}: {what}")

    path: list[NodeRow] = []
    at: int | None = sample.leaf_id
    while at is not None:
        if at not in nodes:
            raise wrong(f"node {at} of its path is not there")
        path.append(nodes[at])
        at = nodes[at].parent_id
        if len(path) > len(nodes):
            raise wrong("its path is a cycle")
    path.reverse()
    start = 0
    for node in path:
        if node.start != start:
            raise wrong(f"node {node.id} covers tokens {node.start}..{node.start + node.length}, expected {start}..")
        start += node.length
    owned = [n for n in path if n.id in set(sample.owned_nodes)]
    if missing := set(sample.owned_nodes) - {n.id for n in owned}:
        raise wrong(f"owned node {min(missing)} is not on its path")
    count = sum(n.length for n in owned)
    if start != sample.n_tokens or count != sample.n_targets:
        raise wrong(f"has {start} tokens and {count} targets, its row says {sample.n_tokens} and {sample.n_targets}")
    if not count or count > sample.rollout_targets:
        raise wrong(f"has {count} of the rollout's {sample.rollout_targets} targets")
    if owned[0].start == 0:
        raise wrong("its first token is a target, but nothing predicts it")
    return owned


def _behaviour(sample: SampleRow, node: NodeRow) -> NDArray[np.float32]:
    where = f"sample {sample.id} of rollout {sample.rollout_id}"
    if not node.generated or node.logprobs is None:
        raise BatchError(f"{where}: owned node {node.id} is not a generated one with log-probs")
    known = unpack_logprobs(node.logprobs)
    if len(known) != node.length or not np.isfinite(known).all():
        raise BatchError(f"{where}: node {node.id} needs {node.length} finite log-probs")
    return known


def pack_samples(samples: Sequence[TrainSample]) -> PackedBatch:
    """Branches side by side, nothing shared. Raises BatchError for none."""
    if not samples:
        raise BatchError("a micro-batch needs at least one sample")
    lengths = [len(s.ids) for s in samples]
    starts = np.cumsum((0, *lengths[:-1]))
    ids = np.concatenate([s.ids for s in samples]).astype(np.int64)
    targets = np.concatenate([s.targets + start for s, start in zip(samples, starts, strict=True)])
    return _batch(
        TreeRow.sequences(lengths),
        ids,
        targets - 1,
        ids[targets],
        np.concatenate([s.behaviour for s in samples]),
        np.repeat(np.arange(len(samples)), [len(s.targets) for s in samples]),
        np.full(len(targets), -1, np.int64),
        [s.temperature for s in samples],
        [SampleHead(s.rollout_id, len(s.ids), len(s.targets), s.advantage, s.rollout_targets) for s in samples],
    )


def _batch(
    row: TreeRow,
    ids: NDArray[np.int64],
    before: NDArray[np.int64],
    tokens: NDArray[np.int64],
    behaviour: NDArray[np.float32],
    sample: NDArray[np.int64],
    nodes: NDArray[np.int64],
    temperatures: Sequence[float],
    heads: Sequence[SampleHead],
) -> PackedBatch:
    """`before` [N]: the row position that predicts each target; `temperatures` and `heads` are by sample."""
    order = np.argsort(before, kind="stable")
    # Targets of one predictor are of one rollout, so they were sampled at one temperature.
    positions, first, predictors = np.unique(before[order], return_index=True, return_inverse=True)
    sample = sample[order]
    return PackedBatch(
        row=row,
        ids=ids,
        positions=positions,
        temperatures=np.asarray(temperatures, np.float32)[sample[first]],
        predictors=predictors,
        target_ids=tokens[order],
        behaviour=behaviour[order].astype(np.float32, copy=False),
        sample=sample,
        nodes=nodes[order],
        samples=tuple(heads),
    )


def check_whole_rollouts(samples: Sequence[SampleHead]) -> None:
    """Raise BatchError unless every rollout's targets are all here, as a ratio over whole rollouts needs."""
    found: dict[str, int] = {}
    for sample in samples:
        found[sample.rollout_id] = found.get(sample.rollout_id, 0) + sample.n_targets
    for sample in samples:
        if found[sample.rollout_id] != sample.rollout_targets:
            raise BatchError(
                f"objective.ratio = 'rollout': rollout {sample.rollout_id} has {sample.rollout_targets} targets, but "
                f"{found[sample.rollout_id]} of them in this micro-batch; raise trainer.micro_batch_tokens so that a "
                "rollout's branches fit in one, or use ratio = 'branch'"
            )
