"""Rollout with the real activities, a real harness process, real tests and real rows."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Engine, select
from temporalio.client import Client, WorkflowFailureError
from temporalio.testing import ActivityEnvironment

from activities.context import task_at
from activities.control import ControlActivities
from activities.rollout import RolloutActivities
from gyre.harness import process
from gyre.store import queries as q
from gyre.store.db import transaction
from gyre.store.models import Score
from tests.workflows.real import RealRun
from tests.workflows.script import LIMIT_S
from tests.workflows.server import TemporalServer
from workflows import messages as m


@pytest.fixture
def make_run(engine: Engine, database: str, temporal: TemporalServer, tmp_path: Path):  # type: ignore[no-untyped-def]
    runs: list[RealRun] = []

    def make(command: str, **options: object) -> RealRun:
        name = f"r{os.urandom(4).hex()}"
        runs.append(RealRun(engine, database, temporal.address, tmp_path, command, name=name, **options))  # type: ignore[arg-type]
        return runs[-1]

    yield make
    for run in runs:
        process.end_all(run.settings.data / "rollouts")


def scores(engine: Engine, rollout: str) -> list[tuple[int, str, float | None]]:
    with transaction(engine) as session:
        rows = session.scalars(select(Score).where(Score.rollout_id == rollout).order_by(Score.attempt)).all()
        return [(s.attempt, s.status, s.reward) for s in rows]


async def test_evaluator_failures_are_retried_and_never_a_reward(make_run, client: Client, engine: Engine) -> None:  # type: ignore[no-untyped-def]
    run: RealRun = make_run("true")
    good, flaky, broken, zero = run.rollouts
    run.calls(*run.rollouts)
    run.evaluator(good, fails=0, reward=1.0)
    run.evaluator(flaky, fails=2, how="none", reward=1.0)
    run.evaluator(broken, fails=99, how="nan")
    run.evaluator(zero, fails=0, reward=0.0)
    async with run.workers(client):
        handles = [await run.start(client, r) for r in run.rollouts]
        results = {r: await h.result() for r, h in zip(run.rollouts, handles, strict=True)}
        attempts = {}
        for rollout in run.rollouts:
            async for event in client.get_workflow_handle(rollout).fetch_history_events():
                if event.HasField("activity_task_started_event_attributes"):
                    attempts[rollout] = event.activity_task_started_event_attributes.attempt
    assert [results[r].reward for r in run.rollouts] == [1.0, 1.0, None, 0.0]
    assert results[broken].outcome == "evaluator" and results[broken].exclude_reason == "evaluator"
    assert results[flaky].outcome == "completed"
    assert scores(engine, flaky) == [(1, "no_reward", None), (2, "no_reward", None), (3, "ok", 1.0)]
    assert [status for _, status, _ in scores(engine, broken)] == ["bad_reward"] * 3
    assert attempts == {good: 1, flaky: 3, broken: 3, zero: 1}  # the last activity of each is its scoring
    control = ControlActivities(engine, run.config)
    group = m.HandOut(run.run_id, run.step_id, run.group_id)
    handed = await ActivityEnvironment().run(control.hand_out_group, group)
    assert (handed.outcome, handed.n_valid, handed.samples) == ("trained", 3, 3)
    with transaction(engine) as session:
        row = q.group_row(session, run.group_id)
        assert row.baseline == pytest.approx(2 / 3)
        assert q.rollout_row(session, broken).advantage is None
        signs = [q.rollout_row(session, r).advantage for r in (good, flaky, zero)]
    assert signs[0] == signs[1] and signs[0] > 0 > signs[2] and sum(signs) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("of_the_run", "of_the_task"), [(1.0, None), (1.0, 200.0), (200.0, 1.0)])
async def test_the_smaller_time_limit_ends_the_harness_and_scores_the_workspace(
    make_run, client: Client, of_the_run: float, of_the_task: float | None
) -> None:  # type: ignore[no-untyped-def]
    run: RealRun = make_run("sh -c 'sleep 300' & sleep 300", group_size=2, time_limit_s=of_the_run)
    if of_the_task is not None:
        with (run.folder / "tasks" / "one" / "task.toml").open("a") as file:
            file.write(f"[agent]\ntimeout_sec = {of_the_task}\n")
    rollout = run.rollouts[0]
    run.calls(rollout)
    run.evaluator(rollout, fails=0, reward=0.5)
    async with run.workers(client):
        result = await (await run.start(client, rollout)).result()
    assert (result.outcome, result.reward) == ("timeout", 0.5)
    row = run.row(rollout)
    assert row.harness_started_at is not None and row.harness_ended_at is not None
    assert 1.0 <= (row.harness_ended_at - row.harness_started_at).total_seconds() < 200.0  # the other limit
    end = process.status(run.settings.data / "rollouts" / rollout)
    assert isinstance(end, process.Exited) and end.reason == "killed"


async def test_a_harness_without_a_model_call_is_run_again_then_excluded(make_run, client: Client) -> None:  # type: ignore[no-untyped-def]
    run: RealRun = make_run("exit 3", group_size=2)
    async with run.workers(client):
        result = await (await run.start(client, run.rollouts[0])).result()
    assert (result.outcome, result.reward, result.exclude_reason) == ("infrastructure", None, "no_model_call")
    folders = sorted((run.settings.data / "rollouts" / run.rollouts[0]).parent.iterdir())
    assert [f.name for f in folders] == ["00", "00.a2", "00.a3"]


async def test_cancelling_a_rollout_ends_its_processes_and_settles_its_row(make_run, client: Client) -> None:  # type: ignore[no-untyped-def]
    run: RealRun = make_run("sleep 300", group_size=2)
    rollout = run.rollouts[0]
    async with run.workers(client):
        handle = await run.start(client, rollout)
        folder = run.settings.data / "rollouts" / rollout
        await _until(lambda: isinstance(process.status(folder), process.Running))
        await handle.cancel()
        with pytest.raises(WorkflowFailureError):
            await handle.result()
    assert isinstance(process.status(folder), process.Exited)
    row = run.row(rollout)
    assert (row.state, row.reward, row.exclude_reason) == ("settled", None, "cancelled")


async def test_a_killed_host_finds_the_same_harness_again(make_run, client: Client, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    run: RealRun = make_run("sleep 8; echo done > done.txt", group_size=2)
    rollout = run.rollouts[0]
    run.calls(rollout)
    run.evaluator(rollout, fails=0, reward=1.0)
    folder = run.settings.data / "rollouts" / rollout
    host = _host_process(run, tmp_path)
    try:
        async with run.control_only(client):
            handle = await run.start(client, rollout)
            await _until(lambda: run.row(rollout).state == "running")
            before = process.status(folder)
            assert isinstance(before, process.Running)
            os.kill(host.pid, signal.SIGKILL)
            host.wait()
            assert process.status(folder) == before  # the harness does not notice
            host = _host_process(run, tmp_path)
            result = await asyncio.wait_for(handle.result(), LIMIT_S)
            history = await handle.fetch_history()
    finally:
        host.terminate()
        host.wait(LIMIT_S)
    assert (result.outcome, result.reward) == ("completed", 1.0)
    row, end = run.row(rollout), process.status(folder)
    assert isinstance(end, process.Exited) and end.started == before.started
    assert row.pid == before.harness_pid
    assert (Path(row.workspace or "") / "done.txt").read_text() == "done\n"
    retried = [e.activity_task_started_event_attributes for e in history.events
               if e.HasField("activity_task_started_event_attributes")]  # fmt: skip
    assert [s.attempt for s in retried] == [1, 2, 1]
    assert "HostRestarted" in str(retried[1].last_failure)  # released at once, not by its heartbeat's time-out


async def test_a_running_harness_is_waited_for_while_its_task_cannot_be_read(make_run, engine: Engine) -> None:  # type: ignore[no-untyped-def]
    """A host that was started anew has read no task yet, and the tasks' disk is away for a moment."""
    run: RealRun = make_run("sleep 300", group_size=2, time_limit_s=200)
    task = run.folder / "tasks" / "one"
    with (task / "task.toml").open("a") as file:
        file.write("[agent]\ntimeout_sec = 3\n")
    rollout = run.rollouts[0]
    folder, x = run.settings.data / "rollouts" / rollout, m.RunHarness(run.run_id, rollout, 1, 200)
    with ThreadPoolExecutor(1) as graders:

        def host() -> RolloutActivities:
            task_at.cache_clear()
            return RolloutActivities(engine, "h", run.settings.data / "rollouts", ["http://127.0.0.1:9"], graders)

        ActivityEnvironment().run(host().prepare, m.Prepare(run.run_id, rollout, 1))
        first = asyncio.ensure_future(ActivityEnvironment().run(host().run_harness, x))
        await _until(lambda: isinstance(process.status(folder), process.Running))
        first.cancel()
        await asyncio.wait({first})
        assert isinstance(process.status(folder), process.Running)
        task.rename(run.folder / "away")
        end = await ActivityEnvironment().run(host().run_harness, x)
    assert end.outcome == "timeout" and end.seconds < 200  # the task's own limit held


def _host_process(run: RealRun, tmp_path: Path) -> subprocess.Popen[bytes]:
    with (tmp_path / "host.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "workers.rollout_host"], env={**os.environ, **run.settings.to_env()},
            stdout=log, stderr=log, cwd=Path(__file__).parents[2],
        )  # fmt: skip


async def _until(condition, within_s: float = LIMIT_S) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        await asyncio.sleep(0.05)
