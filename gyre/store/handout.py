"""Handing out a group: rewards become advantages, trees become samples, samples become queued micro-batches.

A group is handed out when its last member is settled, or, under a quorum, in parts: those that are settled when enough
of them have a reward, and each of the rest as it settles.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from gyre.objective.advantages import group_advantages
from gyre.store.queries.handout import (
    NewSample,
    add_samples,
    cut_micro_batches,
    drop_stale,
    give_advantages,
    group_work,
    lock_group,
    oldest_versions,
    settle_group,
)
from gyre.store.queries.rollouts import group_rewards
from gyre.store.queries.samples import trees
from gyre.store.queries.steps import step_row
from gyre.trajectory import SamplePath, micro_batches, select


@dataclass(frozen=True)
class HandOut:
    """Where a group stands after a hand-out. `new`: rollouts that this call handed out; the rest is of all calls.

    `outcome` is the group's, which is `trained` from its first hand-out on, and `open` while it waits for its rewards
    to differ. `tokens` are those that trainers compute: what a micro-batch's branches share, once.
    """

    new: int
    closed: bool
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
    quorum: int | None = None,
) -> HandOut:
    """Hand out what may be of a step's group, in the caller's one transaction. Idempotent.

    Members that are settled with a reward and have not been handed out yet get advantages from the rewards of all
    members that are settled by now. While some run, it takes `quorum` rewards, which must differ; whether a group gives
    a gradient is decided once, by those. When all are settled the group is closed.

    A rollout of which a kept token was sampled by a version before the step's `min_version` counts in its group's
    baseline, but is not trained: its `drop_reason` becomes `stale`.
    `whole_rollouts`: a rollout's samples share a micro-batch, as a ratio over whole rollouts needs, whatever its size.
    Raises ValueError while members run and there is no quorum, and for a group of an evaluation.
    """
    group = lock_group(session, group_id)
    if group.step_id is None:
        raise ValueError(f"group {group_id} belongs to an evaluation; only a step's groups are handed out")
    members = group_rewards(session, group_id)
    n_valid = sum(m.reward is not None for m in members)
    new: dict[str, float] = {}
    outcome = group.outcome
    if group.state == "open":
        running = [m.rollout_id for m in members if m.state != "settled"]
        if running and n_valid < (quorum or len(members)):
            waits = f", and of the {quorum} rewards of a quorum there are {n_valid}" if quorum else ""
            raise ValueError(f"group {group_id} ({group.task}): rollouts {running} are not settled{waits}")
        begun = any(m.handed_out for m in members)
        result = group_advantages([m.reward for m in members], normalize_std, 0.0 if begun else min_std)
        given = zip(members, result.advantages, strict=True)
        new = {m.rollout_id: a for m, a in given if a is not None and not m.handed_out}
        outcome = result.outcome if not running or result.outcome == "trained" else "open"
        if running:
            give_advantages(session, result.baseline, result.std, new)
        else:
            settle_group(session, group_id, result.outcome, result.baseline, result.std, new)
    if new:
        _queue(session, group.step_id, new, branch_cap, micro_batch_tokens, whole_rollouts)
    work = group_work(session, group_id)
    return HandOut(
        len(new), group.state != "open", str(outcome), n_valid, work.samples, work.micro_batches, work.tokens,
        work.targets,
    )  # fmt: skip


def _queue(
    session: Session, step_id: int, advantages: dict[str, float], branch_cap: int, tokens: int, whole_rollouts: bool
) -> None:
    samples, paths = _samples(session, advantages, branch_cap, step_row(session, step_id).min_version)
    ids = add_samples(session, step_id, samples)
    packed = micro_batches(paths, tokens, whole_rollouts=whole_rollouts)
    cut_micro_batches(session, step_id, [([ids[i] for i in batch.samples], batch.tokens) for batch in packed])


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
