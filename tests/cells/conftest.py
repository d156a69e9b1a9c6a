"""Two cells of a real run: a central one of which only the trainer runs, and a whole satellite.

They live for the module, whose tests are the chapters of one story: starting an engine and two trainers takes a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg
import pytest
import pytest_asyncio
from sqlalchemy import Engine

from gyre.config import RunConfig
from gyre.store import queries as q
from gyre.store.db import libpq_url, make_engine, transaction
from tests.cells.bench import Bench
from tests.serving.tiny_policy import write_policy


@pytest.fixture(scope="module")
def database_of_module(postgres_url: str) -> Iterator[str]:
    name = f"cells_{os.getpid()}"
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
