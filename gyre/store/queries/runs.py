"""Runs."""

from __future__ import annotations

from typing import Any, Literal

from sqlalchemy import func, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from gyre.store.models import Run
from gyre.store.queries.rows import the_row

RunState = Literal["running", "paused", "done", "stopped", "failed"]


def create_run(session: Session, run_id: str, config: dict[str, Any], workflow_id: str) -> None:
    """Record a run. Idempotent: a run that exists keeps its first configuration and its progress."""
    values = {"id": run_id, "config": config, "workflow_id": workflow_id}
    session.execute(insert(Run).values(**values).on_conflict_do_nothing())


def run_row(session: Session, run_id: str) -> Run:
    """The run. Raises MissingRow."""
    return the_row(session, Run, run_id)


def set_run_state(session: Session, run_id: str, state: RunState) -> None:
    """Set the state; one that ends the run stamps `ended_at`, one that does not clears it.

    Raises MissingRow, and ValueError for an archived run: it was imported, and no workflow may go on with it.
    """
    if the_row(session, Run, run_id).state == "archived":
        raise ValueError(f"run {run_id} is an import, which is not trained; give the run file another name or seed")
    ended = func.now() if state in ("done", "stopped", "failed") else None
    session.execute(update(Run).where(Run.id == run_id).values(state=state, ended_at=ended))
