"""Trainer processes of several ranks in a run: a tensor-parallel central, a pipeline-parallel satellite."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from sqlalchemy import Engine, select
from torch import Tensor

from gyre.config import LayoutConfig
from gyre.store import queries
from gyre.store.db import transaction
from gyre.store.models import MicroBatch
from gyre.training.batch import pack_rows
from gyre.training.client import TrainerClient
from gyre.training.protocol import TrainerStatus
from gyre.training.trainer import Trainer
from gyre.training.weights import read_hf_weights
from tests.training.test_process import Processes, work
from tests.training.world import World, run_config

LAYOUTS = {"alpha": LayoutConfig(tensor_parallel=2), "beta": LayoutConfig(pipeline_parallel=2)}


@pytest.fixture
def world(tiny_policy: Path, engine: Engine) -> World:
    config = run_config(tiny_policy)
    cells = [cell.model_copy(update={"layout": LAYOUTS[cell.name]}) for cell in config.cells]
    world = World(config.model_copy(update={"cells": cells}), engine)
    world.open_run()
    return world


@pytest.fixture
def processes(world: World, database: str, tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(world, database, tmp_path)
    yield processes
    processes.stop()


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Between two sets of weights, all of them as one vector."""
    return sum(float((tensor - b[name]).square().sum()) for name, tensor in a.items()) ** 0.5


def followers(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_gone(pid: int, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(FileNotFoundError):
        while "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < deadline, f"process {pid} still runs"
            time.sleep(0.05)


async def ready(processes: Processes, client: TrainerClient) -> TrainerStatus:
    """Wait for the process started last."""
    process = processes.running[-1]
    waiting = asyncio.create_task(client.wait_ready(600))
    while not waiting.done():
        assert process.poll() is None, f"the trainer ended with code {process.returncode}; see its log"
        await asyncio.wait([waiting], timeout=0.2)
    return waiting.result()


async def test_a_step_over_two_layouts_is_the_step_of_one_process(world, processes):
    step_id = world.step(0)
    central = processes.start("workers.trainer", cell="alpha")
    await ready(processes, central)
    satellite = processes.start("workers.trainer", cell="beta")
    incarnation = (await ready(processes, satellite)).incarnation

    await asyncio.gather(central.begin(step_id), satellite.load(0))
    await satellite.begin(step_id)
    assert await work(world, satellite, step_id, most=2, cell="beta") == 2
    assert await work(world, central, step_id, most=1) == 1
    await central.absorb(step_id, await satellite.push(step_id), incarnation)
    await satellite.reset(step_id)
    assert (await satellite.status()).held == 0
    assert await work(world, central, step_id) == 3
    assert (await central.status()).held == 6
    made = await central.optimizer_step(step_id)
    assert made["version"] == 1

    # The same step by one process.
    config = world.config
    alone = Trainer(config.policy.path, config.trainer, config.objective)
    alone.load(0, config.policy.path)
    with transaction(world.engine) as session:
        for number in session.scalars(select(MicroBatch.id).where(MicroBatch.step_id == step_id)).all():
            alone.micro_batch(pack_rows(queries.micro_batch_rows(session, number)), "alone")
    result = alone.optimizer_step(6)
    assert made["metrics"]["grad_norm"] == pytest.approx(result.grad_norm, rel=1e-5)
    # Not weight by weight: Adam's first step makes of a gradient that cancels to rounding a step as long as any.
    ours, before = alone.export_hf(), read_hf_weights(config.policy.path)
    assert distance(read_hf_weights(Path(made["checkpoint"])), ours) < 1e-3 * distance(before, ours)

    # The satellite takes the new weights over the transfer, central's checkpoint resumes under one rank.
    await central.publish(1)
    await satellite.load(1)
    assert (await satellite.status()).version == 1
    alone.load(1, Path(made["checkpoint"]))

    # No rank outlives the others.
    leader, [follower] = processes.running[1], followers(processes.running[1].pid)
    leader.send_signal(signal.SIGKILL)
    leader.wait(120)
    [other] = followers(processes.running[0].pid)
    os.kill(other, signal.SIGKILL)
    assert processes.running[0].wait(120) == 1
    wait_gone(follower)


def test_a_layout_that_does_not_fit_the_policy_ends_the_process_with_one_clear_line(world, processes, tmp_path):
    cells = [cell.model_copy(update={"layout": LayoutConfig(tensor_parallel=3)}) for cell in world.config.cells]
    broken = world.config.model_copy(update={"cells": cells})
    processes.settings.run_config.write_text(broken.model_dump_json())
    processes.start("workers.trainer")
    assert processes.running[0].wait(300) == 2
    said = (tmp_path / "alpha-0.log").read_text()
    expected = "layout.tensor_parallel = 3: must divide the policy's num_attention_heads, 4"
    assert said == f"gyre: cell alpha: {expected}\n"
