"""What the live view and `gyre status` show, read from Postgres in a few short queries."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, Engine, Row, text

from gyre.store.queries.cluster import SILENT_S


@dataclass(frozen=True)
class StepLine:
    """One optimizer step. Rewards are those of the rollouts that are settled by now."""

    index: int
    state: str
    rollouts: int
    settled: int
    excluded: int
    reward: float | None
    success: float | None
    """Share of valid rollouts with reward >= 1."""
    logprob_diff: float | None
    """Mean |log-prob sampler - trainer| over its trained tokens."""
    targets: int
    """Trained tokens."""
    micro_batches: int
    computed: int
    seconds: float


@dataclass(frozen=True)
class CellLine:
    """A cell of the run as its agent last reported it."""

    name: str
    central: bool
    role: str | None
    """None: it has never been reported, so that nothing below is known of it."""
    version: int | None
    running_calls: int
    max_running: int | None
    silent_s: float | None
    """Since it was last reported."""
    remote: bool
    """Its agent is started by hand on another machine."""

    @property
    def missing(self) -> bool:
        """Nobody runs it, as far as one can see."""
        return self.role in (None, "down") or (self.silent_s is not None and self.silent_s > SILENT_S)


@dataclass(frozen=True)
class EvaluationLine:
    """A held-out measurement."""

    version: int
    success: float | None
    reward: float | None
    n_valid: int | None
    settled: int
    rollouts: int


@dataclass(frozen=True)
class RunSnapshot:
    """A run at one moment."""

    run_id: str
    state: str
    steps_planned: int
    seconds: float
    version: int | None
    queued: int
    running: int
    """queued + running: the water level."""
    sampled_per_s: float
    """Tokens sampled a second, over the last 20 s of completed calls."""
    trained_per_s: float
    """Packed tokens through the trainers a second, over the last 20 s."""
    steps: list[StepLine]
    cells: list[CellLine]
    evaluations: list[EvaluationLine]
    busiest: list[tuple[str, float]]
    """Components by cores used over the last 10 s, the busiest first."""


def newest_run(engine: Engine) -> str | None:
    """The run that was started last, an imported one only where there is no other; None: there is none."""
    with engine.connect() as connection:
        found: str | None = connection.scalar(
            text("SELECT id FROM runs ORDER BY state = 'archived', started_at DESC LIMIT 1")
        )
    return found


def take_snapshot(engine: Engine, run_id: str) -> RunSnapshot | None:
    """The run now; None where it has no row yet."""
    with engine.connect() as c:
        run = _first(c, _RUN, run_id)
        if run is None:
            return None
        water = _first(c, _WATER, run_id)
        rates = _first(c, _RATES, run_id)
        assert water is not None
        assert rates is not None
        return RunSnapshot(
            run_id=run_id,
            state=run.state,
            steps_planned=run.steps,
            seconds=float(run.seconds),
            version=run.version,
            queued=water.queued,
            running=water.running,
            sampled_per_s=float(rates.sampled),
            trained_per_s=float(rates.trained),
            steps=[StepLine(*row) for row in c.execute(text(_STEPS), {"run": run_id})],
            cells=[CellLine(*row) for row in c.execute(text(_CELLS), {"run": run_id})],
            evaluations=[EvaluationLine(*row) for row in c.execute(text(_EVALUATIONS), {"run": run_id})],
            busiest=[(row.who, float(row.cores)) for row in c.execute(text(_BUSIEST))],
        )


def _first(connection: Connection, query: str, run_id: str) -> Row[tuple[object, ...]] | None:
    return connection.execute(text(query), {"run": run_id}).first()


_RUN = """
SELECT state, (config->>'steps')::int AS steps,
       extract(epoch FROM coalesce(ended_at, clock_timestamp()) - started_at) AS seconds,
       (SELECT max(version) FROM weight_versions w WHERE w.run_id = runs.id) AS version
FROM runs WHERE id = :run
"""

_WATER = """
SELECT count(*) FILTER (WHERE state = 'pending') AS queued,
       count(*) FILTER (WHERE state IN ('running', 'scoring')) AS running
FROM rollouts WHERE run_id = :run AND state <> 'settled'
"""

_RATES = """
SELECT (SELECT coalesce(sum(completion_tokens), 0) / 20.0 FROM calls JOIN rollouts r ON r.id = calls.rollout_id
        WHERE r.run_id = :run AND calls.ended_at > now() - interval '20 s') AS sampled,
       (SELECT coalesce(sum(m.n_tokens), 0) / 20.0 FROM micro_batches m JOIN steps s ON s.id = m.step_id
        WHERE s.run_id = :run AND m.computed_at > now() - interval '20 s') AS trained
"""

_STEPS = """
SELECT s.index, s.state, r.rollouts, r.settled, r.excluded, r.reward, r.success,
       m.logprob_diff, m.targets, m.micro_batches, m.computed,
       extract(epoch FROM coalesce(s.published_at, s.trained_at, clock_timestamp()) - s.started_at)::float8 AS seconds
FROM steps s
CROSS JOIN LATERAL (
    SELECT count(*) AS rollouts, count(*) FILTER (WHERE o.state = 'settled') AS settled,
           count(*) FILTER (WHERE o.exclude_reason IS NOT NULL AND o.outcome <> 'surplus') AS excluded,
           avg(o.reward) AS reward, avg((o.reward >= 1)::int)::float8 AS success
    FROM groups g JOIN rollouts o ON o.group_id = g.id WHERE g.step_id = s.id) r
CROSS JOIN LATERAL (
    SELECT count(*) AS micro_batches, coalesce(sum(n_targets), 0)::bigint AS targets,
           count(*) FILTER (WHERE computed_at IS NOT NULL) AS computed,
           (sum((metrics->>'mean_abs_logprob_diff')::float8 * n_targets)
            / nullif(sum(n_targets) FILTER (WHERE metrics ? 'mean_abs_logprob_diff'), 0))::float8 AS logprob_diff
    FROM micro_batches WHERE step_id = s.id) m
WHERE s.run_id = :run ORDER BY s.index
"""

_CELLS = """
WITH planned AS (
    SELECT cell->>'name' AS name, coalesce((cell->>'central')::bool, false) AS central,
           coalesce(config->'stack'->'remote_cells' ? (cell->>'name'), false) AS remote
    FROM runs, jsonb_array_elements(coalesce(config->'cells', '[]')) cell WHERE id = :run
), reported AS (SELECT * FROM cells WHERE run_id = :run)
SELECT coalesce(c.name, p.name) AS name, coalesce(c.central, p.central) AS central, role, serving_version,
       (SELECT count(*) FROM calls JOIN rollouts r ON r.id = calls.rollout_id
        WHERE r.run_id = :run AND calls.status = 'running' AND calls.cells[cardinality(calls.cells)] = c.name),
       max_running, extract(epoch FROM clock_timestamp() - updated_at)::float8, coalesce(remote, false)
FROM reported c FULL JOIN planned p ON p.name = c.name ORDER BY central DESC, name
"""

_EVALUATIONS = """
SELECT e.version, e.success, e.mean_reward, e.n_valid, r.settled, r.rollouts
FROM evaluations e
CROSS JOIN LATERAL (
    SELECT count(*) AS rollouts, count(*) FILTER (WHERE o.state = 'settled') AS settled
    FROM groups g JOIN rollouts o ON o.group_id = g.id WHERE g.evaluation_id = e.id) r
WHERE e.run_id = :run ORDER BY e.version
"""

_BUSIEST = """
SELECT component || coalesce(' ' || cell, '') AS who, sum(cpu_s) / 10.0 AS cores
FROM cpu_samples WHERE at > now() - interval '10 s' GROUP BY 1 ORDER BY 2 DESC LIMIT 4
"""
