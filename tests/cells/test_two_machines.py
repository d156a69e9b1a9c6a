"""Cells on two machines: central here, a satellite's agent in a network namespace that cannot reach 127.0.0.1 here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from temporalio.client import Client
from temporalio.service import RPCError

from gyre.config import RunConfig
from gyre.ports import free_port
from gyre.store import queries as q
from gyre.store.db import make_engine, transaction
from gyre.store.migrate import upgrade
from gyre.store.server import PostgresServer
from gyre.training.client import TrainerClient
from gyre.training.protocol import Endpoint, TrainerError, TrainerUnavailable
from tests.cells.bench import Bench
from tests.cells.machines import Machines
from tests.serving.calls import generate
from tests.settings import worker_settings
from workflows import messages as m
from workflows.names import cell_queue

pytestmark = pytest.mark.asyncio(loop_scope="module")

AGENT = [sys.executable, "-m", "workers.cell_agent", "--cell", "c1"]
TEMPORAL = str(Path(sys.executable).parent / "temporal")
SWITCH = m.CellSwitch("cells-s0", "c1", "a test")


@dataclass
class Apart:
    """Two cells on two machines, and the database and Temporal that both reach."""

    bench: Bench
    machines: Machines
    temporal: Client
    env: dict[str, str]
    log: Path
    agent: subprocess.Popen[bytes]

    async def ask(self, activity: str, argument: Any, result: type) -> Any:
        """An activity of the satellite's agent."""
        return await self.temporal.execute_activity(
            activity, argument, id=uuid.uuid4().hex, task_queue=cell_queue("cells-s0", "c1"), result_type=result,
            start_to_close_timeout=timedelta(seconds=90), heartbeat_timeout=timedelta(seconds=30),
        )  # fmt: skip

    async def until(self, true: Any) -> None:
        try:
            await self.bench.until(true, 150)
        except AssertionError as error:
            raise AssertionError(f"{error}; its agent's log ends: {end_of(self.log)}") from error


def start(argv: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(argv, env=env, stdout=output, stderr=output)


def end_of(log: Path) -> str:
    return log.read_text()[-3000:]


@contextlib.asynccontextmanager
async def temporal_at(host: str, log: Path) -> AsyncIterator[tuple[str, Client]]:
    address = f"{host}:{free_port(host)}"
    argv = [TEMPORAL, "server", "start-dev", "--headless", "--namespace", "gyre", "--log-level", "error"]
    argv += ["--ip", "0.0.0.0", "--port", address.rpartition(":")[2], "--http-port", str(free_port(host))]
    with log.open("ab") as output:
        server = subprocess.Popen(argv, stdout=output, stderr=output)  # noqa: ASYNC220 - it returns at once
    try:
        client = None
        for _ in range(240):
            assert server.poll() is None, end_of(log)
            with contextlib.suppress(RuntimeError, RPCError):
                client = await Client.connect(address, namespace="gyre")
                break
            await asyncio.sleep(0.5)
        assert client is not None, f"Temporal does not answer at {address}: {end_of(log)}"
        yield address, client
    finally:
        server.terminate()
        await asyncio.to_thread(server.wait)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def apart(machines: Machines, run: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Apart]:
    stack = {"listen": machines.here, "remote_cells": ["c1"]}
    run = RunConfig.model_validate({**run.model_dump(), "stack": stack})
    here, there = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there")
    async with contextlib.AsyncExitStack() as ends:
        database = ends.enter_context(PostgresServer(here / "postgres", listen=machines.here)).url
        assert f"@{machines.here}:" in database
        upgrade(database)
        db = make_engine(database)
        ends.callback(db.dispose)
        with transaction(db) as session:
            q.create_run(session, run.run_id, run.model_dump(mode="json"), run.run_id)
        address, temporal = await ends.enter_async_context(temporal_at(machines.here, here / "temporal.log"))
        bench = Bench(run, db, database, here, machines.here)
        await bench.central.take()
        central = asyncio.create_task(bench.central.trainer.keep(bench.central.report))
        settings = worker_settings(run, database, there, temporal=address, host=machines.there)
        log, env = there / "agent.log", {**os.environ, **settings.to_env()}
        apart = Apart(bench, machines, temporal, env, log, start([*machines.prefix, *AGENT], env, log))
        try:
            await asyncio.wait_for(bench.central.trainer.ready.wait(), 150)
            await apart.until(lambda: _is_up(bench))
            yield apart
        finally:
            apart.agent.send_signal(signal.SIGTERM)
            central.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await central
            bench.central.trainer.stop()
            assert await asyncio.to_thread(apart.agent.wait, 30) == 0


def _is_up(bench: Bench) -> bool:
    with transaction(bench.db) as session:
        row = next((c for c in q.cells(session, "cells-s0") if c.name == "c1"), None)
        return row is not None and row.routable and row.trainer_incarnation is not None


async def test_a_satellite_elsewhere_serves_trains_and_pushes(apart: Apart) -> None:
    bench, machines = apart.bench, apart.machines
    assert str(bench.cell().engine_url).startswith(f"http://{machines.there}:")
    published = bench.version(0)
    assert published is not None and published.ticket is not None
    assert published.ticket["address"].startswith(f"{machines.here}:")
    endpoint = bench.cell("c0").trainer_endpoint
    assert endpoint is not None and endpoint["address"].startswith(f"{machines.here}:")
    assert bench.cell("c1").trainer_endpoint is None  # nobody pushes to a satellite

    step = await bench.sample_step(0)  # its engine answers from there
    bench.hand_out(step)
    bench.close(step)
    assert (await apart.ask("cell_to_train", SWITCH, m.CellSwitched)).role == "train"
    training = asyncio.create_task(apart.ask("cell_train", m.CellTrain("cells-s0", "c1"), m.CellTrained))
    done = await bench.act(bench.on_central.finish_step, m.FinishStep("cells-s0", step.id))
    assert (done.version, done.metrics["micro_batches"]) == (1, 4)
    assert done.metrics["mean_abs_logprob_diff"] < 1e-3
    batches = bench.micro_batches(step)
    assert {(b.state, b.computed_by) for b in batches} == {("done", "c1")}
    assert {b.holder for b in batches} == {bench.central.trainer.incarnation}

    back = await apart.ask("cell_to_rollout", SWITCH, m.CellSwitched)
    assert (back.role, back.version) == ("rollout", 1)
    assert (await training).micro_batches == 4
    assert "serves v1, pulled from central" in apart.log.read_text()
    answer = await generate(str(bench.cell().engine_url), list(range(50)), 3)
    assert answer["meta_info"]["weight_version"] == "1"


async def test_central_answers_over_the_network_only_who_knows_its_token(apart: Apart) -> None:
    row = apart.bench.cell("c0").trainer_endpoint
    assert row is not None
    known = TrainerClient(Endpoint(**row))
    assert (await known.status()).incarnation == apart.bench.central.trainer.incarnation
    with pytest.raises(TrainerError, match=r"only .*not 'wake'"):
        await known.wake()
    for token in ("", "a guess"):
        with pytest.raises(TrainerUnavailable, match="the token is not this trainer's; look up its row in `cells`"):
            await TrainerClient(Endpoint(row["address"], token)).status()
    assert (await known.status()).asleep  # central serves, and still does


async def test_a_central_that_starts_anew_is_found_again(apart: Apart) -> None:
    """Its trainer's next life has another port and token; the row says which, and says nothing in between."""
    bench = apart.bench
    before = bench.cell("c0").trainer_endpoint
    assert before is not None and bench.central.trainer.pid is not None
    os.kill(bench.central.trainer.pid, signal.SIGKILL)
    await bench.until(lambda: bench.cell("c0").trainer_endpoint is None)
    with pytest.raises(TrainerUnavailable, match="listens at no address of the network"):
        await bench.central.central_trainer()
    with pytest.raises(TrainerUnavailable, match=rf"{before['address']}: no trainer listens: .*GYRE_HOST"):
        await TrainerClient(Endpoint(**before)).status()
    await bench.until(lambda: bench.cell("c0").trainer_endpoint is not None, 90)
    assert bench.cell("c0").trainer_endpoint != before
    found = await bench.central.central_trainer()
    assert (await found.status()).incarnation == bench.central.trainer.incarnation


@pytest.mark.parametrize(
    ("variable", "value", "line"),
    [
        ("GYRE_HOST", "127.0.0.1", "GYRE_HOST is 127.0.0.1, which other machines do not reach, but the run has cells"),
        ("GYRE_RUN_CONFIG", "/no/run.json", "GYRE_RUN_CONFIG: no file at /no/run.json"),
    ],
)
async def test_what_a_machine_lacks_is_one_line(apart: Apart, variable: str, value: str, line: str) -> None:
    env = {**apart.env, variable: value}
    ended = await asyncio.to_thread(subprocess.run, AGENT, env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"gyre: {line}") and ended.stderr.count("\n") == 1


async def test_a_machine_without_the_policy_says_so(apart: Apart, tmp_path: Path) -> None:
    run = apart.bench.run
    policy = run.policy.model_copy(update={"path": Path("/no/policy")})
    config = tmp_path / "run.json"
    config.write_text(run.model_copy(update={"policy": policy}).model_dump_json())
    env = {**apart.env, "GYRE_RUN_CONFIG": str(config)}
    there = [*apart.machines.prefix, *AGENT]
    ended = await asyncio.to_thread(subprocess.run, there, env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr == (
        "gyre: cell c1: policy.path: no folder /no/policy on this machine; have the run's machines share it\n"
    )


async def test_of_agents_of_one_cell_on_two_machines_one_stays(apart: Apart, tmp_path: Path) -> None:
    """Two more at once, here and there, while the first one runs: the last who took the cell has it, the others go."""
    machines = apart.machines
    agents = {apart.log: apart.agent}
    for name, host, prefix in (("here", machines.here, ()), ("there", machines.there, machines.prefix)):
        folder = tmp_path / name
        folder.mkdir()
        env = {**apart.env, "GYRE_HOST": host, "GYRE_DATA": str(folder)}
        agents[folder / "agent.log"] = start([*prefix, *AGENT], env, folder / "agent.log")
    await apart.until(lambda: sum(agent.poll() is not None for agent in agents.values()) == 2)
    [(log, apart.agent)] = [(log, agent) for log, agent in agents.items() if agent.poll() is None]
    apart.log = log
    assert "cell c1: taken, epoch 3" in log.read_text() and apart.bench.cell("c1").epoch == 3
    for other in agents.keys() - {log}:
        assert agents[other].returncode == 3
        last = other.read_text().splitlines()[-1]
        assert last.startswith("gyre: cell 'c1' of run 'cells-s0' was taken by another agent (epoch "), last
        assert "Traceback" not in other.read_text()
