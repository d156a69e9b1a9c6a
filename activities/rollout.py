"""The activities of one rollout on its host: workspace, harness, score.

Each may be called again at any point, by another process on the same host: what is on disk and in Postgres decides
what is left to do.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path

from sqlalchemy import Engine
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.beat import beating, is_cancelled_for_good
from activities.context import RunBooks, task_at
from gyre.config import HarnessConfig
from gyre.gateway.sharding import url_of
from gyre.harness import process
from gyre.harness.base import Harness, Launch, LaunchContext
from gyre.harness.forkserver import ForkServer
from gyre.harness.registry import make_harness
from gyre.harness.shepherd import write_json
from gyre.store import models
from gyre.store import queries as q
from gyre.store.db import transaction
from gyre.store.queries.counts import call_counts, score_attempts
from gyre.tasks import workspace
from gyre.tasks.grade import EvaluatorError, GradeResult, grade
from gyre.tasks.harbor import Task
from workflows import messages as m

LIMIT_FILE = "limit.json"
"""Beside a harness's pid.json, written before it: how many seconds it may run."""
LIMIT_SLACK_S = 5.0
"""A harness that ended so long after its limit ended while no worker watched it."""


class RolloutActivities:
    """`rollouts` is the folder of all rollouts; `graders` bounds how many score at once."""

    def __init__(
        self, engine: Engine, host: str, rollouts: Path, gateways: Sequence[str], graders: Executor,
        warm: Callable[[Harness], ForkServer | None] = lambda harness: None,
    ) -> None:  # fmt: skip
        self._engine, self._host, self._rollouts, self._gateways = engine, host, rollouts, gateways
        self._graders, self._warm, self._books = graders, warm, RunBooks(engine)
        self._harness = functools.lru_cache(maxsize=16)(self._make_harness)

    # ---- prepare ----------------------------------------------------------------------------------------------------

    @activity.defn
    def prepare(self, x: m.Prepare) -> m.Prepared:
        """Make the workspace and bind the rollout to this host. A settled rollout is left as it is."""
        with transaction(self._engine) as session:
            row = q.rollout_row(session, x.rollout_id)
            task_path = q.group_row(session, row.group_id).task_path
        if row.state == "settled":
            with transaction(self._engine) as session:
                calls = call_counts(session, x.rollout_id).complete
            settled = m.RolloutResult(x.rollout_id, row.outcome or "", row.reward, row.exclude_reason, calls)
            return m.Prepared(row.host or self._host, settled)
        if x.attempt > 1:
            process.end_all(self._folder(x.rollout_id, x.attempt - 1))  # nothing of it may go on calling the gateway
        made = workspace.prepare(task_at(Path(task_path)), self._folder(x.rollout_id, x.attempt))
        with transaction(self._engine) as session:
            q.set_rollout(
                session, x.rollout_id, state="pending", host=self._host, workspace=str(made), prepared_at=_now()
            )
        return m.Prepared(self._host)

    # ---- run_harness ------------------------------------------------------------------------------------------------

    @activity.defn
    async def run_harness(self, x: m.RunHarness) -> m.HarnessEnd:
        """Start the harness, or attach to the one that runs; wait for its end or its limit, the run's or its task's.

        The harness outlives this process. Only the workflow's cancellation ends it, and the limit.
        """
        folder = self._folder(x.rollout_id, x.attempt)
        async with beating():
            try:
                now = await self._started(x, folder)
                limit = _limit_s(folder)
                end = await self._end(x, folder, now, limit)
            except asyncio.CancelledError:
                if await is_cancelled_for_good():
                    await asyncio.to_thread(process.end_all, folder)
                raise
            return await asyncio.to_thread(self._record_end, x, end, limit)

    async def _started(self, x: m.RunHarness, folder: Path) -> process.Status:
        """What has become of the harness, which is started where none was. One that was is found again by its folder
        alone: it is waited for also while its task cannot be read."""
        if not isinstance(now := process.status(folder), process.NotStarted):
            return now
        starting = asyncio.ensure_future(asyncio.to_thread(self._start, x, folder))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait({starting})  # whoever ends it must find it
            raise
        return process.status(folder)

    async def _end(self, x: m.RunHarness, folder: Path, now: process.Status, limit_s: float) -> process.Status:
        if not isinstance(now, process.Running):
            return now
        await asyncio.to_thread(self._record_start, x, now)
        try:
            async with asyncio.timeout(max(0.0, now.started + limit_s - time.time())):
                return await process.wait(folder)
        except TimeoutError:
            return await asyncio.to_thread(process.kill_tree, folder)

    def _start(self, x: m.RunHarness, folder: Path) -> None:
        config = self._books.config(x.run_id)
        with transaction(self._engine) as session:
            row = q.rollout_row(session, x.rollout_id)
            task = task_at(Path(q.group_row(session, row.group_id).task_path))
        if row.state == "settled":
            raise ValueError(f"rollout {x.rollout_id}: settled as {row.outcome}; its harness must not start")
        harness = self._harness(config.harness.model_dump_json())
        launch: Launch = harness.command(
            LaunchContext(
                base_url=f"{url_of(row.token, self._gateways)}/r/{row.token}",
                api_key=row.token,
                model=config.policy.name,
                instruction=task.instruction,
                workspace=Path(row.workspace or ""),
                rollout_dir=folder,
                env=task.env,
                context=config.policy.context,
                max_tokens=config.sampling.max_tokens,
            )
        )
        limit_s = min(x.time_limit_s, task.agent_timeout_s or x.time_limit_s)
        write_json(str(folder / LIMIT_FILE), {"limit_s": limit_s})
        process.start(launch, folder, fork_server=self._warm(harness))

    def _make_harness(self, config: str) -> Harness:
        return make_harness(HarnessConfig.model_validate_json(config))

    def _record_start(self, x: m.RunHarness, now: process.Running) -> None:
        with transaction(self._engine) as session:
            q.set_rollout(
                session, x.rollout_id, state="running", host=self._host, pid=now.harness_pid,
                harness_started_at=_utc(now.started),
            )  # fmt: skip

    def _record_end(self, x: m.RunHarness, end: process.Status, limit_s: float) -> m.HarnessEnd:
        outcome, code, started, ended = _judge(end, limit_s)
        with transaction(self._engine) as session:
            counts = call_counts(session, x.rollout_id)
            # One that asked for nothing may run anew: until then it waits, and has to be served like any that waits.
            q.set_rollout(
                session, x.rollout_id, state="scoring" if counts.complete else "pending", exit_code=code,
                harness_started_at=_utc(started), harness_ended_at=_utc(ended),
            )  # fmt: skip
        return m.HarnessEnd(outcome, code, counts.complete, counts.sampled, ended - started)

    # ---- score ------------------------------------------------------------------------------------------------------

    @activity.defn
    async def score(self, x: m.ScoreRollout) -> m.Scored:
        """Grade the workspace and settle the rollout; after the last failed attempt, settle it without a reward.

        An evaluator's failure raises, so that Temporal tries again: it is never a reward.
        """
        folder = self._folder(x.rollout_id, x.attempt)
        async with beating():
            known = await asyncio.to_thread(self._settled, x.rollout_id)
            if known is not None:
                return known
            began = _now()
            try:
                result = await self._grade(x, folder)
            except EvaluatorError as error:
                return await asyncio.to_thread(self._record_failure, x, error, began)
            except asyncio.CancelledError:
                if await is_cancelled_for_good():
                    await asyncio.to_thread(process.end_all, folder)
                raise
            return await asyncio.to_thread(self._record_reward, x, result, began)

    async def _grade(self, x: m.ScoreRollout, folder: Path) -> GradeResult:
        task = await asyncio.to_thread(self._task_of, x.rollout_id)
        limit = min(x.time_limit_s, task.verifier_timeout_s)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._graders, functools.partial(grade, task, folder, limit))

    def _task_of(self, rollout_id: str) -> Task:
        with transaction(self._engine) as session:
            row = q.rollout_row(session, rollout_id)
            return task_at(Path(q.group_row(session, row.group_id).task_path))

    def _settled(self, rollout_id: str) -> m.Scored | None:
        with transaction(self._engine) as session:
            row: models.Rollout = q.rollout_row(session, rollout_id)
        if row.state != "settled":
            return None
        return m.Scored(row.outcome or "", row.reward, row.exclude_reason)

    def _record_reward(self, x: m.ScoreRollout, result: GradeResult, began: dt.datetime) -> m.Scored:
        with transaction(self._engine) as session:
            attempt = score_attempts(session, x.rollout_id) + 1
            q.record_score(session, x.rollout_id, attempt, "ok", result.reward, result.detail, began)
            q.set_rollout(session, x.rollout_id, scored_at=_now())
            settled = q.settle_rollout(session, x.rollout_id, x.outcome, result.reward)  # type: ignore[arg-type]
        return m.Scored(settled.outcome, settled.reward, settled.exclude_reason)

    def _record_failure(self, x: m.ScoreRollout, error: EvaluatorError, began: dt.datetime) -> m.Scored:
        detail = {**error.detail, "error": error.message}
        with transaction(self._engine) as session:
            attempt = score_attempts(session, x.rollout_id) + 1
            q.record_score(session, x.rollout_id, attempt, error.status, None, detail, began)
            if attempt >= x.score_attempts:
                settled = q.settle_rollout(session, x.rollout_id, "evaluator", None, "evaluator")
                return m.Scored(settled.outcome, settled.reward, settled.exclude_reason)
        raise ApplicationError(f"attempt {attempt} of {x.score_attempts}: {error}", type="EvaluatorError") from error

    def _folder(self, rollout_id: str, attempt: int) -> Path:
        return self._rollouts / (rollout_id if attempt == 1 else f"{rollout_id}.a{attempt}")


def _limit_s(folder: Path) -> float:
    limit_s: float = json.loads((folder / LIMIT_FILE).read_bytes())["limit_s"]
    return limit_s


def _judge(end: process.Status, limit_s: float) -> tuple[str, int | None, float, float]:
    """(outcome, exit code, started, ended) of a harness; times in epoch seconds."""
    match end:
        case process.Exited(code=code, reason=reason, started=started, ended=ended):
            at_limit = ended - started >= limit_s
            if at_limit and (reason == "killed" or ended - started >= limit_s + LIMIT_SLACK_S):
                return "timeout", code, started, ended
            if reason == "killed":  # by somebody else: a stack that went down
                return "infrastructure", code, started, ended
            return ("completed" if code == 0 else "harness_error"), code, started, ended
        case process.Lost(started=started):
            return "infrastructure", None, started, time.time()
    raise RuntimeError(f"a harness that was started is {end}")


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def _utc(epoch_s: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(epoch_s, dt.UTC)
