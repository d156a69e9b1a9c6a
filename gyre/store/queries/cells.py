"""Cells, their changes of role, and what the processes use."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypedDict, Unpack

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from gyre.store.models import Cell, CpuSample, RoleChange
from gyre.store.queries.rows import the_row

Role = Literal["rollout", "to_train", "train", "to_rollout", "down"]


class CellUpdate(TypedDict, total=False):
    """What a cell's agent reports. `central`, `role` and `max_running` are needed when the cell is new."""

    central: bool
    role: Role
    engine_url: str | None
    routable: bool
    admits: bool
    serving_version: int | None
    max_running: int
    kv_tokens: int
    engine_incarnation: str | None
    trainer_incarnation: str | None
    trainer_endpoint: dict[str, str] | None


@dataclass(frozen=True)
class CpuUse:
    """CPU seconds that a component used since its sample before."""

    component: str
    cpu_s: float
    cell: str | None = None


def upsert_cell(session: Session, run_id: str, name: str, **values: Unpack[CellUpdate]) -> None:
    """Store what is given and leave the rest as it was. NOTIFYs `gyre_cells` with the run's id at the commit."""
    mine = session.get(Cell, (name, run_id), with_for_update=True, populate_existing=True)
    if mine is None:
        missing = {"central", "role", "max_running"} - values.keys()
        if missing:
            raise ValueError(f"cell {name!r} of run {run_id!r} is new: {sorted(missing)} must be given")
        known = {**values, "updated_at": func.now()}
        new = insert(Cell).values(name=name, run_id=run_id, **values)
        session.execute(new.on_conflict_do_update(index_elements=[Cell.name, Cell.run_id], set_=known))
        return
    for column, value in values.items():
        setattr(mine, column, value)
    mine.updated_at = func.now()
    session.flush()


def cells(session: Session, run_id: str) -> list[Cell]:
    """The run's cells: the central one first, then by name."""
    query = select(Cell).where(Cell.run_id == run_id).order_by(Cell.central.desc(), Cell.name)
    return list(session.scalars(query, execution_options={"populate_existing": True}))


def living_trainers(session: Session, run_id: str, within_s: float) -> set[str]:
    """Incarnations of the run's trainers whose agents reported them in the last `within_s` seconds.

    What others claimed or held in the ledger is lost: see `requeue_lost`.
    """
    fresh = Cell.updated_at >= func.now() - dt.timedelta(seconds=within_s)
    query = select(Cell.trainer_incarnation).where(Cell.run_id == run_id, Cell.trainer_incarnation.is_not(None), fresh)
    return {found for found in session.scalars(query) if found is not None}


def trainer_endpoint(session: Session, run_id: str, name: str) -> dict[str, str] | None:
    """Where other machines reach the trainer of the cell, {address, token}; None: nowhere, or it does not run."""
    return session.scalars(select(Cell.trainer_endpoint).where(Cell.run_id == run_id, Cell.name == name)).first()


def start_role_change(session: Session, run_id: str, cell: str, from_role: str, to_role: str, reason: str) -> int:
    """Open the record of a change of role. Idempotent: a change to the same role that has not ended is continued."""
    query = (
        select(RoleChange.id)
        .where(RoleChange.run_id == run_id, RoleChange.cell == cell)
        .where(RoleChange.to_role == to_role, RoleChange.ended_at.is_(None))
        .order_by(RoleChange.id.desc())
        .limit(1)
    )
    known = session.scalars(query).first()
    if known is not None:
        return known
    row = RoleChange(run_id=run_id, cell=cell, from_role=from_role, to_role=to_role, reason=reason)
    session.add(row)
    session.flush()
    return row.id


def end_role_change(
    session: Session, change_id: int, phases: dict[str, float], rss_mb: Mapping[str, Mapping[str, float]] | None = None
) -> None:
    """Close the record with the seconds that each phase took, and the memory after it (see RoleChange). Idempotent: the
    first end stays. Raises MissingRow."""
    row = the_row(session, RoleChange, change_id, lock=True)
    if row.ended_at is None:
        row.phases = {**row.phases, **phases}
        row.rss_mb = {phase: dict(sizes) for phase, sizes in (rss_mb or {}).items()}
        row.ended_at = session.scalar(select(func.clock_timestamp()))
        session.flush()


def add_cpu_samples(session: Session, run_id: str | None, samples: Sequence[CpuUse]) -> None:
    """Record the CPU use of the components since the samples before."""
    if samples:
        session.execute(insert(CpuSample), [{"run_id": run_id, **asdict(s)} for s in samples])
