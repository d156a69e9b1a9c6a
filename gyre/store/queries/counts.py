"""Small facts that workflows decide by."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from gyre.store.models import Call, MicroBatch, Node, Score, Step


@dataclass(frozen=True)
class CallCounts:
    """Completed model calls of a rollout, and tokens that were sampled for it, by completed calls or not."""

    complete: int
    sampled: int


def call_counts(session: Session, rollout_id: str) -> CallCounts:
    """What a rollout's harness has asked of the policy so far."""
    complete = select(func.count()).where(Call.rollout_id == rollout_id, Call.status == "complete")
    sampled = select(func.coalesce(func.sum(Node.length), 0)).where(
        Node.rollout_id == rollout_id, Node.kind == "generated"
    )
    row = session.execute(select(complete.scalar_subquery(), sampled.scalar_subquery())).one()
    return CallCounts(int(row[0]), int(row[1]))


def backlog_tokens(session: Session, run_id: str) -> int:
    """Tokens that can be trained now: in micro-batches of the oldest open step whose gradient no trainer holds yet.

    A later step's wait for the optimizer step before them.
    """
    oldest = select(func.min(Step.index)).where(Step.run_id == run_id, Step.state != "done").scalar_subquery()
    query = (
        select(func.coalesce(func.sum(MicroBatch.n_tokens), 0))
        .join(Step, Step.id == MicroBatch.step_id)
        .where(Step.run_id == run_id, Step.index == oldest, MicroBatch.state.in_(("queued", "claimed")))
    )
    return int(session.scalars(query).one())


def score_attempts(session: Session, rollout_id: str) -> int:
    """Attempts at scoring that are recorded."""
    return session.scalars(select(func.count()).where(Score.rollout_id == rollout_id)).one()
