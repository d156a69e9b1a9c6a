"""Held-out measurements."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from gyre.store.models import Evaluation, Group, Rollout
from gyre.store.queries.rows import the_row


def open_evaluation(session: Session, run_id: str, version: int) -> int:
    """The id of the run's evaluation of `version`. Idempotent."""
    values = {"run_id": run_id, "version": version}
    session.execute(insert(Evaluation).values(**values).on_conflict_do_nothing())
    query = select(Evaluation.id).where(Evaluation.run_id == run_id, Evaluation.version == version)
    return session.scalars(query).one()


def finish_evaluation(session: Session, evaluation_id: int) -> Evaluation:
    """Compute and store the result from its settled rollouts; excluded ones count nowhere. Idempotent.

    `success` and `mean_reward` stay NULL when no rollout is valid. Raises ValueError while one is not settled.
    """
    row = the_row(session, Evaluation, evaluation_id, lock=True)
    if row.ended_at is not None:
        return row
    of_it = select(Rollout.state, Rollout.reward).join(Group).where(Group.evaluation_id == evaluation_id)
    members = session.execute(of_it).all()
    if waiting := sum(m.state != "settled" for m in members):
        raise ValueError(f"evaluation {evaluation_id}: {waiting} of {len(members)} rollouts are not settled")
    rewards = [m.reward for m in members if m.reward is not None]
    row.n_valid = len(rewards)
    if rewards:
        row.success = sum(r >= 1 for r in rewards) / len(rewards)
        row.mean_reward = sum(rewards) / len(rewards)
    for group in session.scalars(select(Group).where(Group.evaluation_id == evaluation_id)):
        group.state, group.outcome, group.settled_at = "settled", "evaluation", func.now()
    row.ended_at = session.scalar(select(func.clock_timestamp()))
    session.flush()
    return row


def evaluations(session: Session, run_id: str) -> list[Evaluation]:
    """The run's evaluations, by version."""
    return list(session.scalars(select(Evaluation).where(Evaluation.run_id == run_id).order_by(Evaluation.version)))
