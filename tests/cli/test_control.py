"""`gyre pause`, `resume` and `stop` on a real Temporal server; the run's activities are scripted."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from temporalio.client import Client, WorkflowHandle

from gyre.cli.stackfile import StackState
from gyre.config import RunConfig, load_run_config
from tests.cli.conftest import Gyre
from tests.settings import NOBODY, worker_settings
from tests.workflows.script import Script, plan
from tests.workflows.server import NAMESPACE, TemporalServer
from tests.workflows.test_training_run import Gate, start, until
from workflows.messages import RunResult
from workflows.run import TrainingRun

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "run.toml"
seeds = itertools.count()


@pytest.fixture(scope="module")
def temporal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemporalServer]:
    with TemporalServer(tmp_path_factory.mktemp("temporal") / "server.log") as server:
        yield server


@pytest.fixture
def run() -> RunConfig:
    return load_run_config(QUICKSTART, seed=next(seeds))


@pytest.fixture
def stack(data: Path, run: RunConfig, temporal: TemporalServer, database: str) -> Path:
    """A data folder whose stack is up for `run`."""
    state = StackState.read(data)
    assert state is not None
    settings = worker_settings(run, database, data, temporal=temporal.address)
    state.model_copy(update={"run_id": run.run_id, "environment": settings.to_env()}).write(data)
    return data


@asynccontextmanager
async def running(
    run: RunConfig, temporal: TemporalServer, held: Gate
) -> AsyncIterator[tuple[Script, WorkflowHandle[TrainingRun, RunResult]]]:
    """The run with two live rollouts of four in its first step."""
    client = await Client.connect(temporal.address, namespace=NAMESPACE)
    script = Script(plan(run_id=run.run_id, max_concurrent=2), held=held)
    async with script.workers(client):
        handle = await start(client, script)
        await until(lambda: len(script.live) == 2)
        yield script, handle


async def test_a_run_is_paused_resumed_and_stopped(
    gyre: Gyre, stack: Path, run: RunConfig, temporal: TemporalServer
) -> None:
    async def says(*arguments: object) -> tuple[int, str, str]:
        return await asyncio.to_thread(gyre, *arguments, "--data", stack)

    async with running(run, temporal, Gate()) as (script, handle):
        code, out, err = await says("pause")
        assert (code, err) == (0, "") and out.startswith(f"{run.run_id} is paused: ")
        assert (await handle.query(TrainingRun.status)).state == "paused"
        assert await says("pause") == (1, "", f"gyre: {run.run_id}: the run is paused already; `resume` it\n")
        code, _, err = await says("stop", "--finish-steps")
        assert code == 1 and "the run is paused, so what is open would not end" in err
        assert await says("resume") == (0, f"{run.run_id} is running.\n", "")
        assert await says("resume") == (1, "", f"gyre: {run.run_id}: the run is not paused\n")
        assert script.happened("mark") == ["paused", "running"]
        code, out, err = await says("stop")
        assert (code, err) == (0, "") and out.startswith(f"{run.run_id} is stopping: its live rollouts are ended")
        assert (await handle.result()).state == "stopped"
        assert set(script.settled.values()) == {"cancelled"}
        for verb in ("pause", "resume", "stop"):
            code, _, err = await says(verb)
            assert code == 1 and err.startswith(f"gyre: no run is running: {run.run_id} has ended; `gyre train"), err


async def test_a_run_is_stopped_when_its_step_has_ended_from_a_container_too(
    gyre: Gyre, tmp_path: Path, run: RunConfig, temporal: TemporalServer, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment of compose's services stands in for `stack.json`."""
    for name, value in worker_settings(run, database, tmp_path, temporal=temporal.address).to_env().items():
        monkeypatch.setenv(name, value)
    gate = Gate()
    async with running(run, temporal, gate) as (script, handle):
        code, out, err = await asyncio.to_thread(gyre, "stop", "--finish-steps")
        assert (code, err) == (0, "") and "when its open steps have ended" in out
        gate.is_open = True
        result = await handle.result()
    assert (result.state, result.steps_done) == ("stopped", 1)
    assert list(script.settled.values()) == [""] * 4


@pytest.mark.parametrize("verb", ["pause", "resume", "stop"])
def test_where_no_run_is_running_it_is_said(gyre: Gyre, stack: Path, run: RunConfig, database: str, verb: str) -> None:
    code, out, err = gyre(verb, "--data", stack)
    assert (code, out) == (1, "") and err.startswith(f"gyre: no run is running: {run.run_id} has not begun; ")
    state = StackState.read(stack)
    assert state is not None
    state.model_copy(update={"run_id": None}).write(stack)
    code, out, err = gyre(verb, "--data", stack)
    assert (code, out) == (1, "") and f"the stack on {stack} is up without one" in err
    away = worker_settings(run, database, stack, temporal=NOBODY).to_env()
    state.model_copy(update={"environment": away}).write(stack)
    code, out, err = gyre(verb, "--data", stack)
    assert (code, out) == (1, "") and err.startswith(f"gyre: Temporal at {NOBODY} does not answer: "), err
    assert err.count("\n") == 1
