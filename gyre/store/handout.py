"""Handing out a group: rewards become advantages, trees become samples, samples become queued micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from gyre.objective.advantages import group_advantages
from gyre.store.queries.groups import group_row
from gyre.store.queries.handout import (
    NewSample,
    add_samples,
    cut_micro_batches,
    drop_stale,
    oldest_versions,
    settle_group,
)
from gyre.store.queries.rollouts import group_rewards
from gyre.store.queries.samples import trees
from gyre.store.queries.steps import step_row
from gyre.trajectory import SamplePath, micro_batches, select


@dataclass(frozen=True)
class HandOut:
    """What a group gave. `first` is False when it had been handed out before; then the counts are zero.

    `tokens` are those that trainers compute: what a micro-batch's branches share, once.
    """

    first: bool
    outcome: str
    n_valid: int
    samples: int
    micro_batches: int
    tokens: int
    targets: int


def hand_out(
    session: Session,
    group_id: int,
    *,
    branch_cap: int,
    micro_batch_tokens: int,
    normalize_std: bool,
    min_std: float = 0.0,
    whole_rollouts: bool = False,
) -> HandOut:
    """Close a step's group, whose members are all settled, in the caller's one transaction. Idempotent.

    A rollout of which a kept token was sampled by a version before the step's `min_version` counts in its group's
    baseline, but is not trained: its `drop_reason` becomes `stale`.
    `whole_rollouts`: a rollout's samples share a micro-batch, as a ratio over whole rollouts needs, whatever its size.
    Raises ValueError while a member is not settled, and for a group of an evaluation.
    """
    step_id = group_row(session, group_id).step_id
    if step_id is None:
        raise ValueError(f"group {group_id} belongs to an evaluation; only a step's groups are handed out")
    members = group_rewards(session, group_id)
    result = group_advantages([m.reward for m in members], normalize_std, min_std)
    n_valid = sum(m.reward is not None for m in members)
    advantages = {m.rollout_id: a for m, a in zip(members, result.advantages, strict=True) if a is not None}
    if not settle_group(session, group_id, result.outcome, result.baseline, result.std, advantages):
        return HandOut(False, str(group_row(session, group_id).outcome), n_valid, 0, 0, 0, 0)
    samples, paths = _samples(session, advantages, branch_cap, step_row(session, step_id).min_version)
    packed = micro_batches(paths, micro_batch_tokens, whole_rollouts=whole_rollouts)
    ids = add_samples(session, step_id, samples)
    cut_micro_batches(session, step_id, [([ids[i] for i in batch.samples], batch.tokens) for batch in packed])
    tokens, targets = sum(batch.tokens for batch in packed), sum(s.n_targets for s in samples)
    return HandOut(True, result.outcome, n_valid, len(samples), len(packed), tokens, targets)


def _samples(
    session: Session, advantages: dict[str, float], branch_cap: int, min_version: int
) -> tuple[list[NewSample], list[SamplePath]]:
    kept_by = {rollout_id: select(tree, branch_cap) for rollout_id, tree in trees(session, list(advantages)).items()}
    oldest = oldest_versions(session, [node for kept in kept_by.values() for k in kept for node in k.owned_nodes])
    stale = {rollout_id for rollout_id, version in oldest.items() if version < min_version}
    drop_stale(session, sorted(stale))
    samples, paths = [], []
    for rollout_id, kept in kept_by.items():
        if rollout_id in stale:
            continue
        rollout_targets = sum(k.n_targets for k in kept)
        samples += [
            NewSample(
                rollout_id=rollout_id,
                leaf_id=k.branch.leaf_id,
                kind=k.branch.kind,
                rank=k.rank,
                n_tokens=k.branch.n_tokens,
                n_targets=k.n_targets,
                owned_nodes=list(k.owned_nodes),
                rollout_targets=rollout_targets,
                advantage=advantages[rollout_id],
            )
            for k in kept
        ]
        paths += [SamplePath(rollout_id, tuple((n.id, n.length) for n in k.branch.nodes)) for k in kept]
    return samples, paths
