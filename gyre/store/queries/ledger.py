"""The ledger of micro-batches: which process holds whose gradient, so that each one counts exactly once.

See `gyre.store.models.MicroBatch` for the states. Every move here is a single statement or under row locks; what is
in a trainer's memory follows the ledger, never the other way round.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import CursorResult, case, func, select, text, update
from sqlalchemy.orm import Session, aliased

from gyre.store.models import Group, MicroBatch, Step
from gyre.store.queries.rows import the_row

_QUEUED: dict[str, Any] = {
    "state": "queued", "holder": None, "computed_by": None, "claimed_at": None, "computed_at": None,
}  # fmt: skip


class LedgerError(RuntimeError):
    """The ledger does not allow this move; nothing was changed."""


@dataclass(frozen=True)
class StepProgress:
    """Where the micro-batches of a step are. A step is ready for its optimizer step when `complete_at(central)`."""

    state: str
    queued: int
    claimed: int
    held_by: dict[str, int]
    done: int
    groups_open: int
    groups: int

    def complete_at(self, central: str) -> bool:
        """All groups are handed out and central's incarnation holds every micro-batch."""
        return self.groups_open == 0 and self.queued == self.claimed == 0 and set(self.held_by) <= {central}


# COALESCE evaluates its second part only when the first finds nothing: a retried claim finds its own row again.
_CLAIM = text("""
    UPDATE micro_batches
       SET attempts = attempts + (state = 'queued')::int,
           claimed_at = CASE WHEN state = 'queued' THEN clock_timestamp() ELSE claimed_at END,
           state = 'claimed', holder = :incarnation, computed_by = :cell
     WHERE id = COALESCE(
        (SELECT id FROM micro_batches
          WHERE step_id = :step_id AND state = 'claimed' AND holder = :incarnation ORDER BY id LIMIT 1),
        (SELECT id FROM micro_batches
          WHERE step_id = :step_id AND state = 'queued' ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED))
    RETURNING id
""")


def claim_micro_batch(session: Session, step_id: int, cell: str, incarnation: str) -> int | None:
    """Take the oldest queued micro-batch of the step for a trainer; None when there is none.

    Idempotent per incarnation: one that has claimed a micro-batch and not finished it gets the same one again.
    """
    found: int | None = session.scalar(_CLAIM, {"step_id": step_id, "cell": cell, "incarnation": incarnation})
    return found


# What is left must be enough for every other cell that trains: nobody idles because of a claim made ahead.
_CLAIM_AHEAD = text("""
    UPDATE micro_batches
       SET attempts = attempts + 1, claimed_at = clock_timestamp(),
           state = 'claimed', holder = :incarnation, computed_by = :cell
     WHERE id = (SELECT id FROM micro_batches
                  WHERE step_id = :step_id AND state = 'queued' ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED)
       AND (SELECT count(*) FROM micro_batches WHERE step_id = :step_id AND state = 'queued')
         > (SELECT count(*) FROM cells c JOIN steps s ON s.run_id = c.run_id
             WHERE s.id = :step_id AND c.role IN ('to_train', 'train') AND c.name <> :cell)
    RETURNING id
""")


def claim_ahead(session: Session, step_id: int, cell: str, incarnation: str) -> int | None:
    """Take one more micro-batch for a trainer that computes, so that it can be made ready meanwhile; None: there is
    none, or the other cells that train need what is queued. One that is not computed after all: `unclaim`."""
    found: int | None = session.scalar(_CLAIM_AHEAD, {"step_id": step_id, "cell": cell, "incarnation": incarnation})
    return found


def unclaim(session: Session, step_id: int, incarnation: str, besides: int | None = None) -> int:
    """Queue again what `incarnation` claimed and does not compute; `besides` is what it does. Returns how many.

    They do not count as attempts.
    """
    mine = update(MicroBatch).where(
        MicroBatch.step_id == step_id,
        MicroBatch.state == "claimed",
        MicroBatch.holder == incarnation,
        MicroBatch.id.is_distinct_from(besides),
    )
    return _count(session, mine.values(**_QUEUED, attempts=MicroBatch.attempts - 1))


def micro_batch_row(session: Session, micro_batch_id: int) -> MicroBatch:
    """The micro-batch. Raises MissingRow."""
    return the_row(session, MicroBatch, micro_batch_id)


def hold_micro_batch(session: Session, micro_batch_id: int, incarnation: str, metrics: dict[str, Any]) -> bool:
    """Its gradient is now in the accumulator of `incarnation`. Idempotent.

    False: the claim was lost (somebody queued it again). The accumulator then holds a gradient that the ledger does
    not know; the caller must throw the accumulator away and `requeue_holder`.
    """
    claimed = update(MicroBatch).where(
        MicroBatch.id == micro_batch_id, MicroBatch.state == "claimed", MicroBatch.holder == incarnation
    )
    # One that was claimed ahead began when the one before it had ended: a trainer computes one at a time.
    before = aliased(MicroBatch)
    last = (
        select(func.max(before.computed_at))
        .where(before.step_id == MicroBatch.step_id, before.computed_by == MicroBatch.computed_by)
        .scalar_subquery()
    )
    values = {
        "state": "held",
        "claimed_at": func.greatest(MicroBatch.claimed_at, last),
        "computed_at": func.clock_timestamp(),
        "metrics": metrics,
    }
    if _count(session, claimed.values(**values)):
        return True
    row = the_row(session, MicroBatch, micro_batch_id)
    return row.state == "held" and row.holder == incarnation


def held_metrics(session: Session, step_id: int, incarnation: str) -> dict[int, dict[str, Any]]:
    """Metrics, by id, of the step's micro-batches whose gradient the ledger says is with `incarnation`."""
    held = select(MicroBatch.id, MicroBatch.metrics).where(
        MicroBatch.step_id == step_id, MicroBatch.state == "held", MicroBatch.holder == incarnation
    )
    return {row.id: row.metrics for row in session.execute(held.order_by(MicroBatch.id))}


def move_held(
    session: Session,
    step_id: int,
    from_incarnation: str,
    to_incarnation: str,
    micro_batch_ids: Sequence[int] | None = None,
) -> int:
    """Commit of a push: what `from_incarnation` held is in the accumulator of `to_incarnation`. All or nothing.

    Give `micro_batch_ids`, the ones whose gradient the pushed sum contains, so that one computed meanwhile is not
    moved with them; None moves all. Returns how many moved. Raises LedgerError if one of them is not held by
    `from_incarnation`, or if it holds none: then the pushed sum must not be added.
    """
    if from_incarnation == to_incarnation:
        raise LedgerError(f"step {step_id}: {from_incarnation} cannot push to itself")
    held = select(MicroBatch.id).where(
        MicroBatch.step_id == step_id, MicroBatch.state == "held", MicroBatch.holder == from_incarnation
    )
    locked = set(session.scalars(held.order_by(MicroBatch.id).with_for_update()))
    wanted = locked if micro_batch_ids is None else set(micro_batch_ids)
    if not wanted or not wanted <= locked:
        missing = sorted(wanted - locked) or "any micro-batch"
        raise LedgerError(f"step {step_id}: {from_incarnation} does not hold {missing}; its push is void")
    moved = update(MicroBatch).where(MicroBatch.id.in_(wanted)).values(holder=to_incarnation)
    return _count(session, moved)


def requeue_lost(session: Session, step_id: int, living: Collection[str]) -> int:
    """Queue again what incarnations that are not `living` claimed or held: their memory is gone. Returns how many."""
    # NOT IN an empty set is true of every row, which is what an empty `living` means.
    return _requeue(session, step_id, MicroBatch.holder.not_in(list(living)))


def requeue_holder(session: Session, step_id: int, incarnation: str) -> int:
    """Queue again what `incarnation` claimed or held, since it threw its accumulator away. Returns how many."""
    return _requeue(session, step_id, MicroBatch.holder == incarnation)


def step_progress(session: Session, step_id: int) -> StepProgress:
    """Counts of one moment. Raises MissingRow."""
    step = the_row(session, Step, step_id)
    holder = case((MicroBatch.state == "held", MicroBatch.holder))
    query = (
        select(MicroBatch.state, holder, func.count())
        .where(MicroBatch.step_id == step_id)
        .group_by(MicroBatch.state, holder)
    )
    counts = {(state, who): n for state, who, n in session.execute(query)}
    still_open = func.count().filter(Group.state != "handed_out")
    groups_open, groups = session.execute(select(still_open, func.count()).where(Group.step_id == step_id)).one()
    return StepProgress(
        state=step.state,
        queued=counts.get(("queued", None), 0),
        claimed=counts.get(("claimed", None), 0),
        held_by={who: n for (state, who), n in counts.items() if state == "held" and who is not None},
        done=counts.get(("done", None), 0),
        groups_open=groups_open,
        groups=groups,
    )


def _requeue(session: Session, step_id: int, whose: Any) -> int:
    lost = update(MicroBatch).where(MicroBatch.step_id == step_id, MicroBatch.state.in_(("claimed", "held")), whose)
    return _count(session, lost.values(**_QUEUED))


def _count(session: Session, statement: Any) -> int:
    result = session.execute(statement.execution_options(synchronize_session=False))
    assert isinstance(result, CursorResult)
    return result.rowcount
