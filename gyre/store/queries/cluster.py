"""What the scheduler measures of a run: work that waits, what the cells hold, how fast they are."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.orm import Session

from gyre.store.queries.counts import backlog_tokens

RECENT_MICRO_BATCHES = 32
"""Newest computed micro-batches whose median speed counts."""
RECENT_CHANGES = 8
"""Newest changes of role, each way, whose median length counts."""
SILENT_S = 30.0
"""A cell whose agent has not written its row for so long serves nobody."""


@dataclass(frozen=True)
class CellFacts:
    """A cell: whether it can serve now; the live rollouts whose newest answer it gave, so that their prefixes lie in
    its cache; the tokens of their contexts; and the tokens that the cache holds (None: not known)."""

    name: str
    serves: bool
    rollouts: int
    context_tokens: int
    kv_tokens: int | None


@dataclass(frozen=True)
class ClusterFacts:
    """A run at one moment.

    `live_rollouts`: those whose harness has yet to start or to end; `running_rollouts`: those whose harness runs.
    `backlog_tokens`: of the oldest open step, whose gradient no trainer holds yet. `train_tokens_s`, `to_train_s`,
    `to_rollout_s`: medians over the newest of this run, of one cell; None before the first. `oldest_age_s`: since when
    the oldest running harness of the oldest open step runs; None without one. `context_tokens`: contexts of all running
    rollouts, also of those that no cell has answered yet.
    """

    live_rollouts: int
    running_rollouts: int
    backlog_tokens: int
    train_tokens_s: float | None
    to_train_s: float | None
    to_rollout_s: float | None
    oldest_age_s: float | None
    context_tokens: int
    cells: tuple[CellFacts, ...]


def cluster_facts(session: Session, run_id: str) -> ClusterFacts:
    """Measure the run. A few index look-ups for each live rollout and each cell."""
    q = {"run": run_id, "batches": RECENT_MICRO_BATCHES, "changes": RECENT_CHANGES, "silent": SILENT_S}
    speed = session.execute(text(_SPEED), q).scalar_one()
    took = {row.to_role: row.seconds for row in session.execute(text(_CHANGES), q)}
    live = session.execute(text(_LIVE), q).all()
    cells = [
        CellFacts(
            row.name,
            row.serves,
            sum(r.cell == row.name for r in live),
            sum(r.tokens for r in live if r.cell == row.name),
            row.kv_tokens,
        )
        for row in session.execute(text(_CELLS), q)
    ]
    return ClusterFacts(
        live_rollouts=session.execute(text(_LEVEL), q).scalar_one(),
        running_rollouts=len(live),
        backlog_tokens=backlog_tokens(session, run_id),
        train_tokens_s=speed,
        to_train_s=took.get("train"),
        to_rollout_s=took.get("rollout"),
        oldest_age_s=session.execute(text(_OLDEST), q).scalar_one(),
        context_tokens=sum(r.tokens for r in live),
        cells=tuple(cells),
    )


_LEVEL = "SELECT count(*) FROM rollouts WHERE run_id = :run AND state IN ('pending', 'running')"

_SPEED = """
SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY n_tokens / seconds)::float8
  FROM (SELECT m.n_tokens, EXTRACT(epoch FROM m.computed_at - m.claimed_at)::float8 AS seconds
          FROM micro_batches m JOIN steps s ON s.id = m.step_id
         WHERE s.run_id = :run AND m.state IN ('held', 'done') AND m.computed_at > m.claimed_at
         ORDER BY m.id DESC LIMIT :batches) AS newest
"""

# Of two, the lower: the first change of a process is slow.
_CHANGES = """
SELECT to_role, percentile_disc(0.5) WITHIN GROUP (ORDER BY seconds)::float8 AS seconds
  FROM (SELECT to_role, EXTRACT(epoch FROM ended_at - started_at)::float8 AS seconds,
               row_number() OVER (PARTITION BY to_role ORDER BY id DESC) AS nth
          FROM role_changes WHERE run_id = :run AND ended_at > started_at) AS newest
 WHERE nth <= :changes GROUP BY to_role
"""

_OLDEST = """
SELECT EXTRACT(epoch FROM clock_timestamp() - min(r.harness_started_at))::float8
  FROM rollouts r JOIN groups g ON g.id = r.group_id
 WHERE r.run_id = :run AND r.state = 'running'
   AND g.step_id = (SELECT id FROM steps WHERE run_id = :run AND state <> 'done' ORDER BY index LIMIT 1)
"""

# A rollout's context: of its newest call, and of those that run beside it. Its cell: who gave its newest answer.
_LIVE = """
SELECT r.id, COALESCE(context.tokens, 0)::bigint AS tokens, home.cell
  FROM rollouts r
  LEFT JOIN LATERAL (
       SELECT sum(tokens) AS tokens FROM (
              SELECT seq, COALESCE(prompt_tokens, 0) + COALESCE(completion_tokens, 0) AS tokens
                FROM calls WHERE rollout_id = r.id AND status = 'running'
              UNION
             (SELECT seq, COALESCE(prompt_tokens, 0) + COALESCE(completion_tokens, 0)
                FROM calls WHERE rollout_id = r.id AND status <> 'refused' ORDER BY seq DESC LIMIT 1)) AS c
       ) AS context ON true
  LEFT JOIN LATERAL (
       SELECT cells[array_upper(cells, 1)] AS cell
         FROM calls WHERE rollout_id = r.id AND cells <> '{}' ORDER BY seq DESC LIMIT 1) AS home ON true
 WHERE r.run_id = :run AND r.state = 'running'
"""

_CELLS = """
SELECT name, kv_tokens, routable AND updated_at > clock_timestamp() - make_interval(secs => :silent) AS serves
  FROM cells WHERE run_id = :run ORDER BY central DESC, name
"""
