"""What report.html shows: the facts of `gyre.store.report`, and what only the page needs."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from gyre.store import report
from gyre.store.close_up import CloseUp, close_up, telling_step
from gyre.store.db import transaction
from gyre.store.queries.rows import MissingRow
from gyre.store.queries.runs import run_row
from gyre.store.wall_time import IDLE

ORCHESTRATION = frozenset({"temporal", "postgres", "control", "rollout-host", "supervisor", "prepare"})
"""Components whose CPU time is the price of being durable and recorded."""

LIFE = ("waiting_s", "harness_and_tools_s", "queue_s", "prefill_s", "decode_s", "scoring_s", "settling_s")
"""Parts of a rollout's life, in order; they sum to its whole length."""


class ReportError(Exception):
    """There is nothing to report; the message is one line."""


@dataclass(frozen=True)
class Window:
    """A step or an evaluation as a stretch of time."""

    name: str
    """`step 1` (counted from 1, as people do) or `held-out v0`."""
    began: float
    """Seconds since the run began."""
    ended: float
    cpu: dict[str, float]
    """Component -> CPU seconds within the stretch."""
    life: dict[str, float]
    """Parts of LIFE -> seconds, summed over its rollouts."""

    @property
    def orchestration_cpu(self) -> float | None:
        """Share of all CPU seconds that orchestration used; None where no sample fell into the stretch."""
        total = sum(self.cpu.values())
        return sum(s for c, s in self.cpu.items() if c in ORCHESTRATION) / total if total else None


@dataclass(frozen=True)
class ReportData:
    """Everything on the page."""

    run_id: str
    state: str
    config: dict[str, Any]
    began: dt.datetime
    seconds: float
    steps: list[report.StepFacts]
    evaluations: list[report.EvaluationFacts]
    roles: list[report.RoleSpan]
    close_up: CloseUp | None
    """The step that shows best how cells move; None before the first that is finished."""
    times: list[report.StepTime]
    windows: list[Window]
    fates: list[report.TokenFate]
    outcomes: list[tuple[str, int]]
    """How rollouts ended, and how many."""
    forks: dict[str, int]

    @property
    def orchestration_wall(self) -> float | None:
        """Share of the finished steps' wall time that belongs to no other activity; None before the first."""
        total = sum(t.seconds for t in self.times)
        return sum(t.parts.get(IDLE, 0.0) for t in self.times) / total if total else None

    @property
    def orchestration_cpu(self) -> float | None:
        """Share of the CPU seconds of all steps that orchestration used."""
        steps = [w for w in self.windows if w.name.startswith("step")]
        total = sum(sum(w.cpu.values()) for w in steps)
        return sum(s for w in steps for c, s in w.cpu.items() if c in ORCHESTRATION) / total if total else None


def read_report(engine: Engine, run_id: str, step: int | None = None) -> ReportData:
    """Read the run's report; `step` (from 0) is shown close up. Raises ReportError where either does not exist."""
    with transaction(engine) as s:
        try:
            run = run_row(s, run_id)
        except MissingRow as error:
            raise ReportError(f"no run {run_id!r} in this database; `gyre status` names the newest one") from error
        ended = run.ended_at or s.execute(text("SELECT clock_timestamp()")).scalar_one()
        return ReportData(
            run_id=run_id,
            state=run.state,
            config=run.config,
            began=run.started_at,
            seconds=(ended - run.started_at).total_seconds(),
            steps=report.steps(s, run_id),
            evaluations=report.evaluation_results(s, run_id),
            roles=report.role_spans(s, run_id),
            close_up=_close_up(s, run_id, step),
            times=report.step_times(s, run_id),
            windows=_windows(s, run_id),
            fates=report.token_fates(s, run_id),
            outcomes=[(row.name, row.n) for row in s.execute(text(_OUTCOMES), {"run": run_id})],
            forks=report.fork_reasons(s, run_id),
        )


def read_close_up(engine: Engine, run_id: str, step: int | None = None) -> tuple[CloseUp, list[report.RoleSpan]]:
    """A step (from 0; None: the most telling one) and the cells' roles over the run. Raises ReportError without it."""
    with transaction(engine) as s:
        found = _close_up(s, run_id, step)
        if found is None:
            raise ReportError(f"no step of run {run_id!r} is finished yet")
        return found, report.role_spans(s, run_id)


def _close_up(session: Session, run_id: str, step: int | None) -> CloseUp | None:
    chosen = telling_step(session, run_id) if step is None else step
    found = None if chosen is None else close_up(session, run_id, chosen)
    if found is None and step is not None:
        raise ReportError(f"step {step + 1} of run {run_id!r} is not there, or not finished yet")
    return found


def _windows(session: Session, run_id: str) -> list[Window]:
    found = []
    for row in session.execute(text(_WINDOWS), {"run": run_id}):
        q = {"run": run_id, "began": row.started_at, "ended": row.ended_at, "step": row.step, "version": row.version}
        cpu = {r.component: float(r.cpu_s) for r in session.execute(text(_CPU), q)}
        life = dict(session.execute(text(_LIFE), q).one()._mapping)
        name = f"step {row.step + 1}" if row.step is not None else f"held-out v{row.version}"
        found.append(Window(name, row.began_s, row.ended_s, cpu, {part: float(life[part]) for part in LIFE}))
    return found


_WINDOWS = """
SELECT w.*, extract(epoch FROM w.started_at - r.started_at)::float8 AS began_s,
       extract(epoch FROM w.ended_at - r.started_at)::float8 AS ended_s
FROM (SELECT run_id, index AS step, NULL::int AS version, started_at,
             coalesce(published_at, trained_at, clock_timestamp()) AS ended_at FROM steps
      UNION ALL
      SELECT run_id, NULL, version, started_at, coalesce(ended_at, clock_timestamp()) FROM evaluations) w
JOIN runs r ON r.id = w.run_id WHERE r.id = :run ORDER BY w.started_at
"""

_CPU = """
SELECT component, sum(cpu_s) AS cpu_s FROM cpu_samples
WHERE run_id = :run AND at > :began AND at <= :ended GROUP BY 1 ORDER BY 2 DESC
"""

_OUTCOMES = """
SELECT coalesce(outcome, state) || coalesce(', excluded: ' || exclude_reason, '') AS name, count(*) AS n
FROM rollouts WHERE run_id = :run GROUP BY 1 ORDER BY 2 DESC, 1
"""

_LIFE = """
SELECT coalesce(sum(waiting_s), 0) AS waiting_s, coalesce(sum(harness_s - call_s), 0) AS harness_and_tools_s,
       coalesce(sum(queue_s), 0) AS queue_s, coalesce(sum(prefill_s), 0) AS prefill_s,
       coalesce(sum(decode_s), 0) AS decode_s, coalesce(sum(scoring_s), 0) AS scoring_s,
       coalesce(sum(total_s - waiting_s - harness_s - scoring_s), 0) AS settling_s
FROM rollout_summary
WHERE run_id = :run AND step IS NOT DISTINCT FROM :step AND evaluated_version IS NOT DISTINCT FROM :version
"""
