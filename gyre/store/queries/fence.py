"""Who may act for a cell: a fence against agents and trainers that were replaced while they were out of touch.

An agent takes its cell when it starts, and the cell's epoch rises. Whatever the agent and its trainer commit from then
on checks that epoch in the same transaction. So once a newer agent has taken the cell, an older one (stopped and woken,
cut off by the network, left over by another stack) can claim, push, step, publish and report nothing any more.
"""

from __future__ import annotations

from sqlalchemy import Select, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from gyre.store.models import Cell


class FencedError(RuntimeError):
    """Another agent has taken the cell. Nothing was changed; whoever gets this must end."""


def take_cell(session: Session, run_id: str, name: str, *, central: bool, max_running: int) -> int:
    """Make the caller the cell's agent: its epoch, from now on the only one that may act. Waits for commits in flight.

    The row then says that the cell serves nothing and has no trainer, so that nothing is routed to the agent before
    and what its trainer held is queued again.
    """
    anew = {
        "central": central, "role": "rollout", "max_running": max_running, "engine_url": None, "routable": False,
        "serving_version": None, "engine_incarnation": None, "trainer_incarnation": None, "trainer_endpoint": None,
    }  # fmt: skip
    taken = insert(Cell).values(name=name, run_id=run_id, epoch=1, **anew)
    return session.scalars(
        taken.on_conflict_do_update(
            index_elements=[Cell.name, Cell.run_id],
            set_={**anew, "epoch": Cell.epoch + 1, "updated_at": func.now()},
        ).returning(Cell.epoch),
        execution_options={"populate_existing": True},
    ).one()


def cell_epoch(session: Session, run_id: str, name: str) -> int:
    """Of the agent that took the cell last; 0: none ever did."""
    return session.scalars(_epoch(run_id, name)).first() or 0


def check_epoch(session: Session, run_id: str, name: str, epoch: int, *, exclusive: bool = False) -> None:
    """Let this transaction commit only if the cell is still at `epoch`; 0: no agent has ever taken it.

    Until the transaction ends nobody can take the cell. `exclusive`: this transaction writes the cell's row itself.
    Raises FencedError.
    """
    found = session.scalars(_epoch(run_id, name).with_for_update(read=not exclusive)).first() or 0
    if found != epoch:
        raise FencedError(
            f"cell {name!r} of run {run_id!r} was taken by another agent (epoch {found}); this one, of epoch {epoch}, "
            "may change nothing more and ends"
        )


def _epoch(run_id: str, name: str) -> Select[int]:
    return select(Cell.epoch).where(Cell.name == name, Cell.run_id == run_id)
