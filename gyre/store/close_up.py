"""One step seen closely: who was live, what each cell served and trained, second by second. Times are UTC."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.orm import Session


@dataclass(frozen=True)
class Stretch:
    """A stretch of a cell's work. `kind`: `call`, `micro-batch`, `optimizer step` or `weights`."""

    cell: str
    kind: str
    began: dt.datetime
    ended: dt.datetime
    tokens: int | None


@dataclass(frozen=True)
class CloseUp:
    """A finished step. `lives`: launch of each of its rollouts, until which it was queued, and its settling; `work`:
    the cells' calls and micro-batches of it; `slots`: calls that each cell takes at once."""

    step: int
    began: dt.datetime
    rollouts_done: dt.datetime
    ended: dt.datetime
    lives: list[tuple[dt.datetime, dt.datetime]]
    work: list[Stretch]
    slots: dict[str, int]
    central: str | None


def telling_step(session: Session, run_id: str) -> int | None:
    """The finished step in which cells trained longest while rollouts of it were still live, or else the newest
    finished one; None where none is finished."""
    found: int | None = session.scalar(text(_TELLING), {"run": run_id})
    return found


def close_up(session: Session, run_id: str, step: int) -> CloseUp | None:
    """The step; None where it does not exist or is not finished."""
    q = {"run": run_id, "step": step}
    head = session.execute(text(_STEP), q).one_or_none()
    if head is None:
        return None
    cells = session.execute(text("SELECT name, max_running, central FROM cells WHERE run_id = :run"), q).all()
    return CloseUp(
        step=step,
        began=head.started_at,
        rollouts_done=head.rollouts_done_at,
        ended=head.ended_at,
        lives=[(row.created_at, row.settled_at) for row in session.execute(text(_LIVES), q)],
        work=[Stretch(*row) for row in session.execute(text(_WORK), q)],
        slots={c.name: c.max_running for c in cells},
        central=next((c.name for c in cells if c.central), None),
    )


_TELLING = """
SELECT s.index FROM steps s
  LEFT JOIN micro_batches m ON m.step_id = s.id AND m.computed_at > m.claimed_at
 WHERE s.run_id = :run AND s.state = 'done' AND s.rollouts_done_at IS NOT NULL
 GROUP BY s.id
 ORDER BY COALESCE(sum(greatest(0, EXTRACT(epoch FROM least(m.computed_at, s.rollouts_done_at) - m.claimed_at))), 0)
          DESC, s.index DESC LIMIT 1
"""

_STEP = """
SELECT started_at, rollouts_done_at, coalesce(published_at, trained_at) AS ended_at
  FROM steps WHERE run_id = :run AND index = :step AND state = 'done' AND rollouts_done_at IS NOT NULL
"""

_LIVES = """
SELECT r.created_at, r.settled_at
  FROM rollouts r JOIN groups g ON g.id = r.group_id JOIN steps s ON s.id = g.step_id
 WHERE s.run_id = :run AND s.index = :step AND r.settled_at IS NOT NULL
"""

_WORK = """
WITH s AS (SELECT * FROM steps WHERE run_id = :run AND index = :step)
SELECT c.cells[array_upper(c.cells, 1)] AS cell, 'call', c.routed_at, c.ended_at, c.completion_tokens
  FROM s JOIN groups g ON g.step_id = s.id JOIN rollouts r ON r.group_id = g.id JOIN calls c ON c.rollout_id = r.id
 WHERE c.cells <> '{}' AND c.ended_at > c.routed_at
UNION ALL
SELECT m.computed_by, 'micro-batch', m.claimed_at, m.computed_at, m.n_tokens
  FROM s JOIN micro_batches m ON m.step_id = s.id WHERE m.computed_at > m.claimed_at
UNION ALL
SELECT k.name, 'optimizer step',
       greatest(s.rollouts_done_at, (SELECT max(computed_at) FROM micro_batches WHERE step_id = s.id)),
       s.trained_at, NULL
  FROM s JOIN cells k ON k.run_id = s.run_id AND k.central
UNION ALL
SELECT k.name, 'weights', s.trained_at, s.published_at, NULL FROM s JOIN cells k ON k.run_id = s.run_id AND k.central
 WHERE s.published_at > s.trained_at
ORDER BY 3
"""
