"""How long rollouts of a step's or an evaluation's tasks took before, for the order of its launches."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import text
from sqlalchemy.orm import Session

OTHER_RUNS = 4
"""Newest other runs that are asked about tasks that a run has not had itself."""


def expected_seconds(session: Session, group_ids: Sequence[int]) -> dict[int, float]:
    """Seconds that a rollout of each group's task took on average, by group; without the groups of unknown tasks.

    `group_ids`: all of one step or of one evaluation. Of each task the newest group counts that was complete when that
    was opened, so asking again says the same: one of this run if there is one, else of the newest others with the same
    policy, harness, tasks and time limit. Its members with a reward count, from the start of the harness to the reward;
    so waits for a cell are in it, and those that ran into the time limit.
    """
    rows = session.execute(text(_SECONDS), {"groups": list(group_ids), "runs": OTHER_RUNS})
    return {row.id: row.seconds for row in rows}


_SECONDS = """
WITH mine AS (
    SELECT g.id, g.task, g.run_id, coalesce(s.started_at, e.started_at) AS opened
      FROM groups g LEFT JOIN steps s ON s.id = g.step_id LEFT JOIN evaluations e ON e.id = g.evaluation_id
     WHERE g.id = ANY(:groups)),
opening AS (SELECT DISTINCT m.run_id, m.opened, r.config FROM mine m JOIN runs r ON r.id = m.run_id),
asked AS (
    SELECT run_id AS id, opened, true AS own FROM opening
     UNION ALL
   (SELECT r.id, o.opened, false
      FROM runs r JOIN opening o ON r.id <> o.run_id AND r.started_at < o.opened
       AND r.config->'policy' = o.config->'policy' AND r.config->'harness' = o.config->'harness'
       AND r.config->'tasks' = o.config->'tasks'
       AND r.config->'rollouts'->'time_limit_s' = o.config->'rollouts'->'time_limit_s'
     ORDER BY r.started_at DESC LIMIT :runs)),
newest AS (
    SELECT DISTINCT ON (g.task) g.task, g.id
      FROM asked a JOIN groups g ON g.run_id = a.id AND g.settled_at < a.opened
     WHERE g.task IN (SELECT task FROM mine) AND g.outcome <> 'too_few_valid'
     ORDER BY g.task, a.own DESC, g.settled_at DESC),
took AS (
    SELECT n.task, avg(EXTRACT(epoch FROM r.settled_at - r.harness_started_at))::float8 AS seconds
      FROM newest n JOIN rollouts r ON r.group_id = n.id
     WHERE r.reward IS NOT NULL AND r.settled_at > r.harness_started_at
     GROUP BY n.task)
SELECT mine.id, took.seconds FROM mine JOIN took USING (task)
"""
