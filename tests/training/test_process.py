"""The trainer process: it answers while it computes, and kill -9 at the worst moments loses and doubles nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from gyre.store import queries
from gyre.store.db import transaction
from gyre.training.client import TrainerClient
from gyre.training.protocol import TrainerError, TrainerUnavailable
from tests.settings import worker_settings
from tests.training.test_replica import assert_close
from tests.training.world import World, run_config


class Processes:
    """Starts trainers of the run's cells and ends them all."""

    def __init__(self, world: World, database: str, data: Path) -> None:
        self.settings = worker_settings(world.config, database, data)
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, *module: str, cell: str = "alpha") -> TrainerClient:
        socket = self.settings.sockets / f"{cell}-{len(self.running)}.sock"
        with (self.settings.data / f"{socket.stem}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *module, "--cell", cell, "--socket", str(socket)],
                env={**os.environ, **self.settings.to_env()},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.running.append(process)
        return TrainerClient(socket)

    def stop(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()


@pytest.fixture
def world(tiny_policy: Path, engine: Engine) -> World:
    world = World(run_config(tiny_policy), engine)
    world.open_run()
    return world


@pytest.fixture
def processes(world: World, database: str, tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(world, database, tmp_path)
    yield processes
    processes.stop()


async def work(world: World, client: TrainerClient, step_id: int, most: int = 100, cell: str = "alpha") -> int:
    incarnation = (await client.status()).incarnation
    for done in range(most):
        with transaction(world.engine) as session:
            claimed = queries.claim_micro_batch(session, step_id, cell, incarnation)
        if claimed is None:
            return done
        await client.micro_batch(claimed)
    return most


async def test_killed_trainers_lose_nothing_and_count_nothing_twice(world, processes, tmp_path):
    """Killed before its micro-batch is held; killed after the save, before the commit; then a step in peace."""
    from gyre.training.trainer import Trainer
    from gyre.training.weights import read_hf_weights

    step_id = world.step(0)
    doomed = processes.start("tests.training.dying_trainer", "hold_micro_batch")
    second = processes.start("tests.training.dying_trainer", "finish_step")
    started = await doomed.wait_ready()
    await second.wait_ready()
    assert (started.version, started.step_id, started.held, started.asleep) == (0, None, 0, False)

    await doomed.begin(step_id)
    with pytest.raises(TrainerUnavailable, match="went away during micro_batch"):
        await work(world, doomed, step_id)
    assert processes.running[0].wait(120) == -signal.SIGKILL
    living = (await second.status()).incarnation
    with transaction(world.engine) as session:
        assert queries.step_progress(session, step_id).claimed == 1
        assert queries.requeue_lost(session, step_id, {living}) == 1

    await second.begin(step_id)
    assert await work(world, second, step_id) == 6
    with pytest.raises(TrainerUnavailable, match="went away during optimizer_step"):
        await second.optimizer_step(step_id)
    with transaction(world.engine) as session:
        assert queries.newest_version(session, world.config.run_id).version == 0
        assert queries.step_row(session, step_id).state == "closed"

    third = processes.start("workers.trainer")
    incarnation = (await third.wait_ready()).incarnation
    with transaction(world.engine) as session:
        assert queries.requeue_lost(session, step_id, {incarnation}) == 6
    await third.begin(step_id)
    assert await work(world, third, step_id) == 6
    made = await third.optimizer_step(step_id)
    assert await third.optimizer_step(step_id) == made
    assert made["version"] == 1
    assert (await third.publish(1))["version"] == 1

    # What stands in the end is the step that one trainer in peace makes.
    config = world.config
    alone = Trainer(config.policy.path, config.trainer, config.objective)
    alone.load(0, config.policy.path)
    from sqlalchemy import select

    from gyre.store.models import MicroBatch
    from gyre.training.batch import pack_rows

    with transaction(world.engine) as session:
        for number in session.scalars(select(MicroBatch.id).order_by(MicroBatch.id)).all():
            alone.micro_batch(pack_rows(queries.micro_batch_rows(session, number)), "alone")
        states = set(session.scalars(select(MicroBatch.state)).all())
    assert states == {"done"}
    alone.optimizer_step(6)
    assert_close(read_hf_weights(Path(made["checkpoint"])), alone.export_hf())
    assert [p.name for p in Path(made["checkpoint"]).parent.iterdir()] == ["v1"]


async def test_status_is_answered_during_start_and_refusals_are_named(world, processes):
    client = processes.start("workers.trainer", cell="beta")
    while True:  # the socket is there long before torch is imported
        try:
            status = await client.status(timeout_s=1)
            break
        except TrainerUnavailable:
            await asyncio.sleep(0.02)
    assert status.busy == "start"
    loading = asyncio.create_task(client.load(0))
    ready = await client.wait_ready()
    assert ready.incarnation == status.incarnation
    with pytest.raises(TrainerError, match="CommandError: run tiny-s0 has no version 0"):
        await loading
    for command, arguments, kind in (
        ("dance", {}, "ValueError"),
        ("optimizer_step", {"step_id": 1}, "ValueError"),
        ("begin", {"nonsense": 1}, "TypeError"),
        ("begin", {"step_id": 999}, "MissingRow"),
    ):
        with pytest.raises(TrainerError) as caught:
            await client.call(command, **arguments)
        assert caught.value.kind == kind
    reader, writer = await asyncio.open_unix_connection(str(client.at))
    writer.write(b"not json\n")
    assert b"ProtocolError" in await reader.readline()
    writer.close()
    await client.sleep()
    assert (await client.status()).asleep
    await client.wake()
    processes.running[0].terminate()
    assert processes.running[0].wait(120) == 0


async def test_a_policy_that_cannot_be_trained_ends_the_process_with_one_clear_line(world, processes, tmp_path):
    broken = world.config.model_copy(update={"policy": world.config.policy.model_copy(update={"path": tmp_path})})
    processes.settings.run_config.write_text(broken.model_dump_json())
    processes.start("workers.trainer")
    assert processes.running[0].wait(300) == 1
    assert f"{tmp_path / 'config.json'}" in (tmp_path / "alpha-0.log").read_text()
