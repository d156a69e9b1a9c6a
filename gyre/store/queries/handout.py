"""Of a group's hand-out: advantages, samples, micro-batches. `gyre.store.handout` puts them in one transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from sqlalchemy import func, insert, select, text, update
from sqlalchemy.orm import Session

from gyre.store.models import Group, MicroBatch, Rollout, Sample
from gyre.store.queries.rows import the_row

GroupOutcome = Literal["trained", "no_variance", "low_variance", "too_few_valid", "evaluation"]


@dataclass(frozen=True)
class NewSample:
    """A sample as it is stored; see `gyre.store.models.Sample`."""

    rollout_id: str
    leaf_id: int
    kind: str
    rank: int
    n_tokens: int
    n_targets: int
    owned_nodes: list[int]
    rollout_targets: int
    advantage: float


@dataclass(frozen=True)
class GroupWork:
    """What has been handed out of a group so far. `tokens`: of its micro-batches, what their branches share once."""

    samples: int
    micro_batches: int
    tokens: int
    targets: int


def lock_group(session: Session, group_id: int) -> Group:
    """The group, which nobody else hands out or settles until this transaction ends. Raises MissingRow."""
    return the_row(session, Group, group_id, lock=True)


def settle_group(
    session: Session,
    group_id: int,
    outcome: GroupOutcome,
    baseline: float | None,
    std: float | None,
    advantages: Mapping[str, float],
) -> bool:
    """Close a group whose members are all settled, with the advantages, by rollout id, of those to hand out now.

    A step's group becomes `handed_out`: its samples and micro-batches must be added in the same transaction, and only
    if this returns True. False: it had been closed before (idempotent). Raises ValueError while a member runs.
    """
    group = lock_group(session, group_id)
    if group.state != "open":
        return False
    running = select(Rollout.id).where(Rollout.group_id == group_id, Rollout.state != "settled")
    if waiting := session.scalars(running.order_by(Rollout.member)).all():
        raise ValueError(f"group {group_id} ({group.task}): rollouts {list(waiting)} are not settled")
    group.state = "settled" if group.step_id is None else "handed_out"
    group.outcome, group.baseline, group.reward_std = outcome, baseline, std
    group.settled_at = session.scalar(select(func.clock_timestamp()))
    session.flush()
    give_advantages(session, baseline, std, advantages)
    return True


def give_advantages(
    session: Session, baseline: float | None, std: float | None, advantages: Mapping[str, float]
) -> None:
    """These rollouts are handed out now, with advantages that come from this mean and deviation of their group."""
    if not advantages:
        return
    now = session.scalar(select(func.clock_timestamp()))
    shared = {"baseline": baseline, "reward_std": std, "handed_out_at": now}
    session.execute(update(Rollout), [{"id": r, "advantage": a, **shared} for r, a in advantages.items()])


def group_work(session: Session, group_id: int) -> GroupWork:
    """The group's samples and the micro-batches that hold them."""
    return GroupWork(*session.execute(_WORK, {"group_id": group_id}).one())


_WORK = text("""
    WITH mine AS (SELECT t.micro_batch_id, t.n_targets
                    FROM samples t JOIN rollouts r ON r.id = t.rollout_id WHERE r.group_id = :group_id)
    SELECT (SELECT count(*) FROM mine), b.batches, b.tokens, (SELECT COALESCE(sum(n_targets), 0) FROM mine)
      FROM (SELECT count(*) AS batches, COALESCE(sum(n_tokens), 0) AS tokens
              FROM micro_batches WHERE id IN (SELECT micro_batch_id FROM mine)) AS b
""")


def oldest_versions(session: Session, node_ids: Sequence[int]) -> dict[str, int]:
    """The oldest policy version that sampled a token of these generated nodes, by rollout."""
    return {row.rollout_id: row.oldest for row in session.execute(_OLDEST, {"nodes": list(node_ids)})}


def drop_stale(session: Session, rollout_ids: Sequence[str]) -> None:
    """Note that these rollouts' tokens are too old to be trained."""
    if rollout_ids:
        session.execute(update(Rollout).where(Rollout.id.in_(rollout_ids)).values(drop_reason="stale"))


_OLDEST = text("""
    SELECT n.rollout_id, min((span ->> 0)::int) AS oldest
      FROM nodes n CROSS JOIN LATERAL jsonb_array_elements(n.version_spans) AS span
     WHERE n.id = ANY (:nodes) GROUP BY n.rollout_id
""")


def add_samples(session: Session, step_id: int, samples: Sequence[NewSample]) -> list[int]:
    """Store samples; returns their ids in order. The database refuses a second sample of the same leaf."""
    if not samples:
        return []
    rows = [{"step_id": step_id, **asdict(s)} for s in samples]
    query = insert(Sample).returning(Sample.id, sort_by_parameter_order=True)
    return list(session.scalars(query, rows))


def cut_micro_batches(session: Session, step_id: int, batches: Sequence[tuple[Sequence[int], int]]) -> list[int]:
    """Queue one micro-batch for each (sample ids, tokens that a trainer will compute); returns their ids in order.

    Raises ValueError if a sample is unknown, of another step, or in a micro-batch already.
    """
    wanted = [i for batch, _ in batches for i in batch]
    query = select(Sample.id, Sample.n_targets).where(
        Sample.id.in_(wanted), Sample.step_id == step_id, Sample.micro_batch_id.is_(None)
    )
    targets = {row.id: row.n_targets for row in session.execute(query.with_for_update())}
    if len(wanted) != len(set(wanted)) or targets.keys() != set(wanted):
        raise ValueError(
            f"step {step_id}: samples {sorted(set(wanted) - targets.keys())} cannot be put in a micro-batch"
        )
    ids = []
    for batch, tokens in batches:
        row = MicroBatch(step_id=step_id, n_tokens=tokens, n_targets=sum(targets[i] for i in batch))
        session.add(row)
        session.flush()
        session.execute(update(Sample).where(Sample.id.in_(batch)).values(micro_batch_id=row.id))
        ids.append(row.id)
    return ids
