"""What a report shows of a run, read in a few queries. Times are UTC; durations are seconds."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from sqlalchemy import text
from sqlalchemy.orm import Session

from gyre.store.queries.runs import run_row
from gyre.store.wall_time import Span, attribute, by_window

_T = TypeVar("_T")


@dataclass(frozen=True)
class StepFacts:
    """A step of the view `step_summary`; the same names."""

    step: int
    state: str
    rollouts: int
    settled: int
    valid: int
    excluded: int
    groups: int
    groups_trained: int
    groups_no_variance: int
    groups_too_few_valid: int
    mean_reward: float | None
    success: float | None
    calls: int
    sampled_tokens: int
    prompt_tokens: int
    cached_tokens: int
    micro_batches: int
    trained_tokens: int
    trained_targets: int
    logprob_diff: float | None
    logprob_diff_max: float | None
    mismatch_kl: float | None
    clip_fraction: float | None
    rejected_fraction: float | None
    started_at: dt.datetime
    rollouts_done_at: dt.datetime | None
    trained_at: dt.datetime | None
    published_at: dt.datetime | None
    total_s: float | None
    metrics: dict[str, Any]


@dataclass(frozen=True)
class EvaluationFacts:
    """Held-out result of a version; `family` is None for all tasks together."""

    version: int
    family: str | None
    success: float | None
    mean_reward: float | None
    n_valid: int


@dataclass(frozen=True)
class TokenFate:
    """Sampled tokens by what became of them; exactly one of `step` and `evaluated_version` is set."""

    step: int | None
    evaluated_version: int | None
    fate: str
    tokens: int


@dataclass(frozen=True)
class RoleSpan:
    """A stretch of a cell's life in one role, or on the way to it (`to_train`, `to_rollout`)."""

    cell: str
    role: str
    started_at: dt.datetime
    ended_at: dt.datetime
    reason: str
    phases: dict[str, float]


@dataclass(frozen=True)
class StepTime:
    """Where the wall time of a step went: `parts` sum to `seconds`. See `gyre.store.wall_time`."""

    step: int
    seconds: float
    parts: dict[str, float]


@dataclass(frozen=True)
class CpuFacts:
    """CPU seconds of a component over the run."""

    component: str
    cell: str | None
    cpu_s: float


def steps(session: Session, run_id: str) -> list[StepFacts]:
    """The run's steps, by index."""
    names = ", ".join(f.name for f in fields(StepFacts))
    return _read(session, StepFacts, f"SELECT {names} FROM step_summary WHERE run_id = :run ORDER BY step", run_id)


def evaluation_results(session: Session, run_id: str) -> list[EvaluationFacts]:
    """Held-out results by version: first of all tasks, then of each family. Unfinished ones show what is settled."""
    return _read(session, EvaluationFacts, _EVALUATIONS, run_id)


def token_fates(session: Session, run_id: str) -> list[TokenFate]:
    """All sampled tokens of the run, by step or evaluation, and by fate."""
    return _read(session, TokenFate, _FATES, run_id)


def fork_reasons(session: Session, run_id: str) -> dict[str, int]:
    """How many calls did not extend the conversation before them, by reason ('root': a first call)."""
    return {row.fork_reason: row.n for row in session.execute(text(_FORKS), {"run": run_id})}


def cpu_use(session: Session, run_id: str) -> list[CpuFacts]:
    """CPU seconds by component and cell, the busiest first."""
    return _read(session, CpuFacts, _CPU, run_id)


def role_spans(session: Session, run_id: str) -> list[RoleSpan]:
    """Every cell's life from the run's start to its end (or now), by cell and time."""
    run = run_row(session, run_id)
    end = run.ended_at or session.execute(text("SELECT clock_timestamp()")).scalar_one()
    changes: dict[str, list[Any]] = defaultdict(list)
    for change in session.execute(text(_CHANGES), {"run": run_id}):
        changes[change.cell].append(change)
    spans = []
    for cell, role in session.execute(
        text("SELECT name, role FROM cells WHERE run_id = :run ORDER BY 1"), {"run": run_id}
    ):
        mine = changes[cell]
        at, now, why = run.started_at, mine[0].from_role if mine else role, ""
        for change in mine:
            arrived = change.ended_at or end
            spans.append(RoleSpan(cell, now, at, change.started_at, why, {}))
            way = f"to_{change.to_role}"
            spans.append(RoleSpan(cell, way, change.started_at, arrived, change.reason, change.phases))
            at, now, why = arrived, change.to_role, change.reason
        spans.append(RoleSpan(cell, now, at, max(at, end), why, {}))
    return [s for s in spans if s.ended_at > s.started_at]


def step_times(session: Session, run_id: str) -> list[StepTime]:
    """Where the wall time of every finished step went, from its opening to the publication of its weights."""
    windows = sorted(
        (step.started_at.timestamp(), end.timestamp(), step.step)
        for step in steps(session, run_id)
        if (end := step.published_at or step.trained_at) is not None
    )
    times = []
    spans = (Span(*row) for row in session.execute(text(_SPANS), {"run": run_id}))
    for (began, ended, step), mine in zip(windows, by_window(spans, [w[:2] for w in windows]), strict=True):
        parts = attribute(mine, began, ended)
        times.append(StepTime(step, sum(parts.values()), parts))
    return sorted(times, key=lambda t: t.step)


def _read(session: Session, kind: type[_T], query: str, run_id: str) -> list[_T]:
    return [kind(*row) for row in session.execute(text(query), {"run": run_id})]


_EVALUATIONS = """
SELECT e.version, CASE WHEN GROUPING(g.family) = 0 THEN g.family END AS family,
       avg((r.reward >= 1)::int)::float8 AS success, avg(r.reward) AS mean_reward, count(r.reward) AS n_valid
  FROM evaluations e JOIN groups g ON g.evaluation_id = e.id JOIN rollouts r ON r.group_id = g.id
 WHERE e.run_id = :run GROUP BY GROUPING SETS ((e.version), (e.version, g.family))
 ORDER BY e.version, GROUPING(g.family) DESC, g.family
"""

_FATES = """
SELECT step, evaluated_version, fate, sum(tokens)::bigint FROM token_accounting WHERE run_id = :run
 GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
"""

_FORKS = """
SELECT c.fork_reason, count(*) AS n FROM calls c JOIN rollouts r ON r.id = c.rollout_id
 WHERE r.run_id = :run AND c.fork_reason IS NOT NULL GROUP BY 1 ORDER BY 2 DESC, 1
"""

_CPU = """
SELECT component, cell, sum(cpu_s) FROM cpu_samples WHERE run_id = :run GROUP BY 1, 2 ORDER BY 3 DESC
"""

_CHANGES = """
SELECT cell, from_role, to_role, reason, phases, started_at, ended_at FROM role_changes WHERE run_id = :run ORDER BY id
"""

# The stretches of time in which something went on. Between two calls a harness thinks and runs its tools.
_SPANS = """
WITH c AS (
    SELECT c.rollout_id, c.started_at, c.routed_at, c.first_token_at, c.ended_at
      FROM calls c JOIN rollouts r ON r.id = c.rollout_id WHERE r.run_id = :run),
between_calls AS (
    SELECT greatest(max(coalesce(c.ended_at, c.started_at)) OVER before, r.harness_started_at) AS began,
           c.started_at AS ended
      FROM c JOIN rollouts r ON r.id = c.rollout_id
    WINDOW before AS (PARTITION BY c.rollout_id ORDER BY c.started_at ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
    UNION ALL
    SELECT greatest(r.harness_started_at, last.ended_at), r.harness_ended_at
      FROM rollouts r LEFT JOIN LATERAL (
           SELECT max(coalesce(c.ended_at, c.started_at)) AS ended_at FROM c WHERE c.rollout_id = r.id) AS last ON true
     WHERE r.run_id = :run AND r.harness_ended_at IS NOT NULL),
spans AS (
    SELECT 'waiting for a cell' AS activity, started_at AS began, routed_at AS ended FROM c
    UNION ALL SELECT 'prefill', routed_at, first_token_at FROM c
    UNION ALL SELECT 'decode', first_token_at, ended_at FROM c
    UNION ALL SELECT 'harness and tools', began, ended FROM between_calls
    UNION ALL SELECT 'scoring', t.started_at, t.ended_at
                FROM scores t JOIN rollouts r ON r.id = t.rollout_id WHERE r.run_id = :run
    UNION ALL SELECT 'training', m.claimed_at, m.computed_at
                FROM micro_batches m JOIN steps s ON s.id = m.step_id WHERE s.run_id = :run
    UNION ALL SELECT 'optimizer step', greatest(s.rollouts_done_at, max(m.computed_at)), s.trained_at
                FROM steps s LEFT JOIN micro_batches m ON m.step_id = s.id WHERE s.run_id = :run GROUP BY s.id
    UNION ALL SELECT 'weights', trained_at, published_at FROM steps WHERE run_id = :run
    UNION ALL SELECT 'role switch', started_at, ended_at FROM role_changes WHERE run_id = :run)
SELECT activity, EXTRACT(epoch FROM began)::float8, EXTRACT(epoch FROM ended)::float8
  FROM spans WHERE ended > began
"""
