"""One rollout: its progress, its scores, its end."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

from sqlalchemy import CursorResult, exists, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from gyre.store.models import Call, Rollout, Score
from gyre.store.queries.rows import the_row

RolloutOutcome = Literal["completed", "timeout", "harness_error", "infrastructure", "evaluator", "surplus"]
ScoreStatus = Literal["ok", "no_reward", "bad_reward", "killed", "error"]

NO_MODEL_CALL = "no_model_call"


class RolloutUpdate(TypedDict, total=False):
    """What the activities of a running rollout may set."""

    state: Literal["pending", "running", "scoring"]
    outcome: RolloutOutcome
    host: str
    workspace: str
    pid: int | None
    exit_code: int | None
    prepared_at: dt.datetime
    harness_started_at: dt.datetime
    harness_ended_at: dt.datetime
    scored_at: dt.datetime


@dataclass(frozen=True)
class Settled:
    """How a rollout ended. `first` is False when it had been settled before; then these are the earlier facts."""

    first: bool
    outcome: str
    reward: float | None
    exclude_reason: str | None


@dataclass(frozen=True)
class MemberReward:
    """A member of a group: `reward` is None while it is not settled, and for good when it is excluded."""

    rollout_id: str
    state: str
    reward: float | None
    exclude_reason: str | None
    handed_out: bool


def rollout_row(session: Session, rollout_id: str) -> Rollout:
    """The rollout. Raises MissingRow."""
    return the_row(session, Rollout, rollout_id)


def set_rollout(session: Session, rollout_id: str, **values: Unpack[RolloutUpdate]) -> bool:
    """Set columns of a rollout that is not settled. False, and nothing changes, when it is settled (or unknown)."""
    unknown = values.keys() - RolloutUpdate.__annotations__.keys()
    if unknown or not values:
        raise ValueError(f"set_rollout: give some of {sorted(RolloutUpdate.__annotations__)}, not {sorted(unknown)}")
    mine = update(Rollout).where(Rollout.id == rollout_id, Rollout.state != "settled").values(**values)
    result = session.execute(mine)
    assert isinstance(result, CursorResult)
    return result.rowcount == 1


def record_score(
    session: Session,
    rollout_id: str,
    attempt: int,
    status: ScoreStatus,
    reward: float | None,
    detail: dict[str, Any],
    started_at: dt.datetime,
) -> None:
    """Record one attempt at scoring, ended now. Idempotent: the first record of an attempt stays.

    Raises ValueError unless status 'ok' goes with a finite reward and any other with None.
    """
    if (status == "ok") != (reward is not None and math.isfinite(reward)):
        raise ValueError(f"score of {rollout_id}: status {status!r} does not go with reward {reward!r}")
    values = {
        "rollout_id": rollout_id,
        "attempt": attempt,
        "status": status,
        "reward": reward,
        "detail": detail,
        "started_at": started_at,
        "ended_at": func.clock_timestamp(),
    }
    session.execute(insert(Score).values(**values).on_conflict_do_nothing())


def settle_rollout(
    session: Session, rollout_id: str, outcome: RolloutOutcome, reward: float | None, exclude_reason: str | None = None
) -> Settled:
    """End a rollout for good, with a reward or with the reason why it has none. Idempotent: the first result stays.

    A rollout that completed no model call says nothing about the policy: it is excluded as `infrastructure`,
    whatever its reward. A call that a dead gateway left running, and that nobody asked for again, is over now as well.
    Raises ValueError for a reward that is not finite, for both reward and reason, for neither.
    """
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"rollout {rollout_id}: reward {reward!r} is not a finite number; exclude it with a reason")
    if (reward is None) == (exclude_reason is None):
        raise ValueError(f"rollout {rollout_id}: give a reward or a reason, not {reward!r} and {exclude_reason!r}")
    row = the_row(session, Rollout, rollout_id, lock=True)
    if row.state == "settled":
        return Settled(False, str(row.outcome), row.reward, row.exclude_reason)
    called = select(exists().where(Call.rollout_id == rollout_id, Call.status == "complete"))
    if exclude_reason is None and not session.scalar(called):
        outcome, reward, exclude_reason = "infrastructure", None, NO_MODEL_CALL
    row.state, row.outcome, row.reward, row.exclude_reason = "settled", outcome, reward, exclude_reason
    row.settled_at = session.scalar(select(func.clock_timestamp()))
    session.flush()
    abandoned = update(Call).where(Call.rollout_id == rollout_id, Call.status == "running")
    session.execute(abandoned.values(status="incomplete", ended_at=func.clock_timestamp()))
    return Settled(True, outcome, reward, exclude_reason)


def group_rewards(session: Session, group_id: int) -> list[MemberReward]:
    """The members of a group, by member."""
    columns = (Rollout.id, Rollout.state, Rollout.reward, Rollout.exclude_reason, Rollout.handed_out_at.is_not(None))
    query = select(*columns).where(Rollout.group_id == group_id).order_by(Rollout.member)
    return [MemberReward(*row) for row in session.execute(query)]
