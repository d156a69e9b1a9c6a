"""Optimizer steps: open, closed, done."""

from __future__ import annotations

from typing import Any, Literal

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from gyre.store.models import Group, MicroBatch, Rollout, Sample, Step
from gyre.store.queries.ledger import LedgerError
from gyre.store.queries.rows import the_row
from gyre.store.queries.versions import add_weight_version


def open_step(session: Session, run_id: str, index: int, min_version: int) -> int:
    """The id of step `index` (0-based). Idempotent: a step that exists keeps its `min_version`."""
    values = {"run_id": run_id, "index": index, "min_version": min_version}
    session.execute(insert(Step).values(**values).on_conflict_do_nothing())
    return session.scalars(select(Step.id).where(Step.run_id == run_id, Step.index == index)).one()


def step_row(session: Session, step_id: int) -> Step:
    """The step. Raises MissingRow."""
    return the_row(session, Step, step_id)


def oldest_unfinished_step(session: Session, run_id: str) -> int | None:
    """The step that training cells work on: the oldest one whose optimizer step is not done. None: there is none."""
    query = select(Step.id).where(Step.run_id == run_id, Step.state != "done").order_by(Step.index).limit(1)
    return session.scalars(query).first()


def unfinished_steps(session: Session, run_id: str) -> list[int]:
    """Indices of the steps whose optimizer step is not done."""
    query = select(Step.index).where(Step.run_id == run_id, Step.state != "done").order_by(Step.index)
    return list(session.scalars(query))


def close_step(session: Session, step_id: int, denominator: Literal["trained", "valid"] = "trained") -> int:
    """Close a step whose groups are all handed out, and fix R. Idempotent.

    Returns R, the denominator of a loss that is averaged over rollouts: those whose tokens are trained (a valid reward,
    in a group that gives a gradient, not too old), or all `valid` ones: those with a reward.
    Raises ValueError while a group is open.
    """
    step = the_row(session, Step, step_id, lock=True)
    if step.n_valid is not None:
        return step.n_valid
    waiting = select(Group.position).where(Group.step_id == step_id, Group.state != "handed_out")
    if open_groups := session.scalars(waiting.order_by(Group.position)).all():
        raise ValueError(f"step {step.index} of {step.run_id}: groups {open_groups} are not handed out yet")
    valid = (
        select(func.count())
        .select_from(Rollout)
        .join(Group)
        .where(Group.step_id == step_id, Rollout.reward.is_not(None))
    )
    if denominator == "trained":
        valid = valid.where(Group.outcome == "trained", Rollout.drop_reason.is_(None))
    step.n_valid = session.scalars(valid).one()
    step.state = "closed"
    step.rollouts_done_at = session.scalar(select(func.clock_timestamp()))
    session.flush()
    return step.n_valid


def step_targets(session: Session, step_id: int) -> int:
    """Targets over all samples of the step: the denominator of a loss that is averaged over tokens."""
    return session.scalars(select(func.coalesce(func.sum(Sample.n_targets), 0)).where(Sample.step_id == step_id)).one()


def finish_step(
    session: Session, step_id: int, version: int, metrics: dict[str, Any], checkpoint: str, *, holder: str
) -> None:
    """The optimizer step is done and `checkpoint` durably holds `version`: one transaction. Idempotent.

    `holder` is central's incarnation. Raises LedgerError, and nothing changes, unless the step is closed, `version`
    is its index + 1, and `holder` holds every micro-batch of it.
    """
    step = the_row(session, Step, step_id, lock=True)
    if version != step.index + 1:
        raise LedgerError(f"step {step.index} of {step.run_id} makes version {step.index + 1}, not {version}")
    if step.state == "done":
        return
    if step.state != "closed":
        raise LedgerError(f"step {step.index} of {step.run_id} is {step.state}, not closed")
    mine = (MicroBatch.state == "held") & (MicroBatch.holder == holder)
    other = select(MicroBatch.id).where(MicroBatch.step_id == step_id, ~mine).order_by(MicroBatch.id)
    if missing := session.scalars(other).all():
        raise LedgerError(
            f"step {step.index} of {step.run_id}: {holder} does not hold the gradient of {len(missing)} micro-batches, "
            f"first {missing[0]}"
        )
    session.execute(update(MicroBatch).where(MicroBatch.step_id == step_id).values(state="done"))
    step.state = "done"
    step.metrics = {**step.metrics, **metrics}
    step.trained_at = session.scalar(select(func.clock_timestamp()))
    session.flush()
    add_weight_version(session, step.run_id, version, checkpoint, step_id)
