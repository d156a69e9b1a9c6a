"""A micro-batch from the database's bytes to arrays: a span of tokens is a buffer all the way, never a list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre.store.queries import SampleRows
from gyre.store.tokens import unpack_ids, unpack_logprobs


class BatchError(ValueError):
    """A sample that cannot be trained; the message names the sample and its rollout."""


@dataclass(frozen=True)
class TrainSample:
    """A branch with its targets. `targets` int64 [m] are positions in the branch; `behaviour` [m] their log-probs
    under the policy that sampled them, at `temperature`."""

    rollout_id: str
    ids: NDArray[np.int32]
    targets: NDArray[np.int64]
    behaviour: NDArray[np.float32]
    advantage: float
    rollout_targets: int
    """N_r: targets of the rollout over all its samples."""
    temperature: float = 1.0


@dataclass(frozen=True)
class PackedBatch:
    """Samples one after another: `ids` int64 [T], and for each target [N] the position in the row of the token that
    predicts it, its id, behaviour log-prob, temperature, and the index of its sample."""

    lengths: tuple[int, ...]
    ids: NDArray[np.int64]
    predictors: NDArray[np.int64]
    target_ids: NDArray[np.int64]
    behaviour: NDArray[np.float32]
    temperatures: NDArray[np.float32]
    sample: NDArray[np.int64]


def sample_from_rows(rows: SampleRows) -> TrainSample:
    """Join the spans of a branch. Raises BatchError where the rows contradict each other."""

    def wrong(what: str) -> BatchError:
        return BatchError(f"sample {rows.id} of rollout {rows.rollout_id}: {what}")

    ids, targets, behaviour, start = [], [], [], 0
    for node in rows.nodes:
        span = unpack_ids(node.token_ids)
        if node.start != start or len(span) != node.length:
            raise wrong(f"node {node.id} covers tokens {node.start}..{node.start + len(span)}, expected {start}..")
        ids.append(span)
        if node.owned:
            if not node.generated or node.logprobs is None:
                raise wrong(f"owned node {node.id} is not a generated one with log-probs")
            known = unpack_logprobs(node.logprobs)
            if len(known) != node.length or not np.isfinite(known).all():
                raise wrong(f"node {node.id} needs {node.length} finite log-probs")
            targets.append(np.arange(start, start + node.length))
            behaviour.append(known)
        start += node.length
    count = sum(map(len, targets))
    if start != rows.n_tokens or count != rows.n_targets:
        raise wrong(f"has {start} tokens and {count} targets, its row says {rows.n_tokens} and {rows.n_targets}")
    if not count or count > rows.rollout_targets:
        raise wrong(f"has {count} of the rollout's {rows.rollout_targets} targets")
    if targets[0][0] == 0:
        raise wrong("its first token is a target, but nothing predicts it")
    return TrainSample(
        rollout_id=rows.rollout_id,
        ids=np.concatenate(ids),
        targets=np.concatenate(targets),
        behaviour=np.concatenate(behaviour),
        advantage=rows.advantage,
        rollout_targets=rows.rollout_targets,
        temperature=rows.temperature,
    )


def pack_samples(samples: Sequence[TrainSample]) -> PackedBatch:
    """Lay samples one after another. Raises BatchError for none."""
    if not samples:
        raise BatchError("a micro-batch needs at least one sample")
    lengths = tuple(len(s.ids) for s in samples)
    starts = np.cumsum((0, *lengths[:-1]))
    counts = [len(s.targets) for s in samples]
    ids = np.concatenate([s.ids for s in samples]).astype(np.int64)
    positions = np.concatenate([s.targets + start for s, start in zip(samples, starts, strict=True)])
    return PackedBatch(
        lengths=lengths,
        ids=ids,
        predictors=positions - 1,
        target_ids=ids[positions],
        behaviour=np.concatenate([s.behaviour for s in samples]).astype(np.float32, copy=False),
        temperatures=np.repeat(np.array([s.temperature for s in samples], np.float32), counts),
        sample=np.repeat(np.arange(len(samples)), counts),
    )


def check_whole_rollouts(samples: Sequence[TrainSample]) -> None:
    """Raise BatchError unless every rollout's targets are all here, as a ratio over whole rollouts needs."""
    found: dict[str, int] = {}
    for sample in samples:
        found[sample.rollout_id] = found.get(sample.rollout_id, 0) + len(sample.targets)
    for sample in samples:
        if found[sample.rollout_id] != sample.rollout_targets:
            raise BatchError(
                f"objective.ratio = 'rollout': rollout {sample.rollout_id} has {sample.rollout_targets} targets, but "
                f"{found[sample.rollout_id]} of them in this micro-batch; raise trainer.micro_batch_tokens so that a "
                "rollout's branches fit in one, or use ratio = 'branch'"
            )
