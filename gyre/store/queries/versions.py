"""Policy versions: durable checkpoints and where their weights can be pulled."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from gyre.store.models import Step, WeightVersion
from gyre.store.queries.rows import MissingRow


def add_weight_version(
    session: Session, run_id: str, version: int, checkpoint: str, step_id: int | None = None
) -> None:
    """Record that `checkpoint` (a folder) durably holds `version`. Idempotent: the first checkpoint stays."""
    values = {"run_id": run_id, "version": version, "checkpoint": checkpoint, "step_id": step_id}
    session.execute(insert(WeightVersion).values(**values).on_conflict_do_nothing())


def weight_version(session: Session, run_id: str, version: int) -> WeightVersion | None:
    """That version, or None when it does not exist yet."""
    return session.get(WeightVersion, (run_id, version), populate_existing=True)


def newest_version(session: Session, run_id: str, *, published: bool = False) -> WeightVersion | None:
    """The highest version of the run; with `published`, the highest that has a ticket. None: there is none."""
    query = select(WeightVersion).where(WeightVersion.run_id == run_id).order_by(WeightVersion.version.desc()).limit(1)
    if published:
        query = query.where(WeightVersion.ticket.is_not(None))
    return session.scalars(query, execution_options={"populate_existing": True}).first()


def set_ticket(session: Session, run_id: str, version: int, ticket: dict[str, Any]) -> None:
    """Store where `version` can be pulled from now on; a later call replaces the ticket, as after a restart of central.

    Tickets of other versions are dropped, since a publisher holds one version. The first publication is stamped on
    the version and on its step. Raises MissingRow.
    """
    mine = (WeightVersion.run_id == run_id, WeightVersion.version == version)
    row = session.execute(
        update(WeightVersion)
        .where(*mine)
        .values(ticket=ticket, published_at=func.coalesce(WeightVersion.published_at, func.now()))
        .returning(WeightVersion.step_id)
    ).one_or_none()
    if row is None:
        raise MissingRow(
            f"weight_versions: run {run_id!r} has no version {version}; its checkpoint must be saved first"
        )
    session.execute(
        update(WeightVersion)
        .where(WeightVersion.run_id == run_id, WeightVersion.version != version, WeightVersion.ticket.is_not(None))
        .values(ticket=None)
    )
    if row.step_id is not None:
        published = func.coalesce(Step.published_at, func.now())
        session.execute(update(Step).where(Step.id == row.step_id).values(published_at=published))


def checkpoints(session: Session, run_id: str) -> list[str]:
    """The folders that the run's versions name, whether they are there still or not."""
    return list(session.scalars(select(WeightVersion.checkpoint).where(WeightVersion.run_id == run_id)))


def stale_checkpoints(session: Session, run_id: str, keep: int) -> list[WeightVersion]:
    """Versions older than the newest `keep`, oldest first, whose folders may be deleted; never version 0."""
    query = (
        select(WeightVersion)
        .where(WeightVersion.run_id == run_id, WeightVersion.version > 0)
        .order_by(WeightVersion.version.desc())
        .offset(keep)
    )
    return list(session.scalars(query))[::-1]
