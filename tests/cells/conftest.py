"""Two cells of a real run: a central one of which only the trainer runs, and a whole satellite.

They live for the module, whose tests are the chapters of one story: starting an engine and two trainers takes a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
import pytest_asyncio
from sqlalchemy import Engine

import activities.cell
import activities.cell_trainer
import activities.cell_work
from activities.cell_process import BackOff
from gyre.config import RunConfig
from gyre.store import queries as q
from gyre.store.db import libpq_url, make_engine, transaction
from tests.cells.bench import Bench
from tests.cells.machines import Machines, two_machines_or_skip
from tests.cells.zygote import Zygote
from tests.serving.tiny_policy import write_policy

if TYPE_CHECKING:
    from tests.cells.pair import Pair

_count = itertools.count()


@pytest.fixture(scope="module")
def database_of_module(postgres_url: str) -> Iterator[str]:
    name = f"cells_{os.getpid()}_{next(_count)}"
    base, _, template = postgres_url.rpartition("/")
    with psycopg.connect(libpq_url(f"{base}/postgres"), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY wal_log")
        yield f"{base}/{name}"
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="module")
def db(database_of_module: str) -> Iterator[Engine]:
    engine = make_engine(database_of_module)
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    policy = write_policy(tmp_path_factory.mktemp("policy"), seed=0)
    return RunConfig.model_validate(
        {
            "name": "cells",
            "steps": 9,
            "policy": {"path": str(policy), "context": 1024},
            "tasks": {"train": str(policy)},
            "serving": {"max_running": 8, "kv_tokens": 8192},
            "trainer": {"micro_batch_tokens": 128, "optimizer": {"lr": 0.01}},
            "objective": {"clip_low": 0.2, "clip_high": 0.2},
            "cells": [{"name": "c0", "central": True}, {"name": "c1"}],
        }
    )


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with two_machines_or_skip() as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(
    run: RunConfig, db: Engine, database_of_module: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Bench]:
    data: Path = tmp_path_factory.mktemp("data")
    with transaction(db) as session:
        q.create_run(session, run.run_id, run.model_dump(mode="json"), run.run_id)
    bench = Bench(run, db, database_of_module, data)
    await bench.central.take()
    central = asyncio.create_task(bench.central.trainer.keep(bench.central.report))
    satellite = asyncio.create_task(bench.satellite.keep())
    try:
        async with asyncio.timeout(300):
            waits = [bench.central.trainer.ready.wait(), bench.satellite.trainer.ready.wait()]
            await asyncio.gather(*waits, bench.satellite.engine.ready.wait())
        yield bench
    finally:
        for task in (central, satellite):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        bench.central.trainer.stop()


# ---- two cells without engines: what trains is killed in a hundred ways ----------------------------------------------


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Imports what trainers need once for all tests."""
    zygote = Zygote(tmp_path_factory.mktemp("zygote"))
    yield zygote
    zygote.stop()


@pytest.fixture(scope="module")
def hurried(zygote: Zygote) -> Iterator[None]:
    """Trainers start in a tenth of a second, and the dead are looked for more often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activities.cell_trainer, "subprocess", zygote)
        patch.setattr(activities.cell_trainer, "BackOff", lambda: BackOff(longest=0.0))
        for module in (activities.cell, activities.cell_work):
            patch.setattr(module, "REQUEUE_S", 0.2)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(
    database_of_module: str, db: Engine, hurried: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Pair]:
    # Here, since they import Megatron.
    from tests.cells.pair import Pair
    from tests.training.conftest import write_tiny_policy
    from tests.training.world import World, run_config

    world = World(run_config(write_tiny_policy(tmp_path_factory.mktemp("policy"))), db)
    world.open_run()
    pair = Pair(world, database_of_module, tmp_path_factory.mktemp("data"))
    await pair.start()
    yield pair
    await pair.stop()
