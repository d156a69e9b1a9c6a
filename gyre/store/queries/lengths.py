"""How long rollouts of a step's tasks took before, for the order of its launches."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.orm import Session

EARLIER_RUNS = 4
"""Newest other runs that are asked about tasks that a run has not had itself."""


def expected_seconds(session: Session, step_id: int) -> dict[str, float]:
    """Seconds that a rollout of each of the step's tasks took on average, by task; without those never measured.

    Of each task the newest group counts that was complete when the step was opened, so asking again says the same: one
    of this run if there is one, else of the newest others with the same policy, harness, tasks and time limit. Its
    members with a reward count, from the start of the harness to the reward; so waits for a cell are in it, and those
    that ran into the time limit. Evaluations of the same task count too.
    """
    rows = session.execute(text(_SECONDS), {"step": step_id, "runs": EARLIER_RUNS})
    return {row.task: row.seconds for row in rows}


_SECONDS = """
WITH step AS (SELECT s.id, s.run_id, s.started_at AS opened, r.config
                FROM steps s JOIN runs r ON r.id = s.run_id WHERE s.id = :step),
runs_asked AS (
    SELECT run_id AS id, true AS own FROM step
     UNION ALL
   (SELECT r.id, false FROM runs r, step
     WHERE r.id <> step.run_id AND r.started_at < step.opened
       AND r.config->'policy' = step.config->'policy' AND r.config->'harness' = step.config->'harness'
       AND r.config->'tasks' = step.config->'tasks'
       AND r.config->'rollouts'->'time_limit_s' = step.config->'rollouts'->'time_limit_s'
     ORDER BY r.started_at DESC LIMIT :runs)),
newest AS (
    SELECT DISTINCT ON (g.task) g.task, g.id
      FROM runs_asked JOIN groups g ON g.run_id = runs_asked.id, step
     WHERE g.task IN (SELECT task FROM groups WHERE step_id = :step)
       AND g.settled_at < step.opened AND g.outcome <> 'too_few_valid'
     ORDER BY g.task, runs_asked.own DESC, g.settled_at DESC)
SELECT newest.task, avg(EXTRACT(epoch FROM r.settled_at - r.harness_started_at))::float8 AS seconds
  FROM newest JOIN rollouts r ON r.group_id = newest.id
 WHERE r.reward IS NOT NULL AND r.settled_at > r.harness_started_at
 GROUP BY newest.task
"""
