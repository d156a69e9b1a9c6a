"""Fixtures of the scripted engine, imported by `tests/conftest.py` so that one server serves every folder's tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gyre.config import RunConfig
from gyre.store.db import make_engine, transaction
from gyre.store.models import Rollout
from gyre.store.queries.groups import TaskRef, create_groups, create_rollouts
from gyre.store.queries.runs import create_run
from gyre.store.queries.steps import open_step
from tests.scripted.engine import SERVING, ScriptedEngine
from tests.scripted.policy import write_policy

if TYPE_CHECKING:
    from tests.gateway.conftest import World

VERSION = 3
MakeWorld = Callable[..., Awaitable["World"]]


@pytest.fixture(scope="session")
def scripted_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy's folder: its tokenizer is a real one of 8,192 tokens."""
    return write_policy(tmp_path_factory.mktemp("scripted-policy"))


@pytest.fixture(scope="session")
def scripted_engine(scripted_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    """The session's one scripted SGLang server, ready, with policy version 3."""
    folder = tmp_path_factory.mktemp("scripted")
    engine = ScriptedEngine(folder, scripted_policy, folder / "scripts")
    engine.start(version=VERSION)
    try:
        asyncio.run(engine.wait_ready())
        yield engine
    finally:
        engine.stop()


@pytest.fixture
async def scripted_world(
    database: str, tmp_path: Path, scripted_policy: Path, scripted_engine: ScriptedEngine
) -> AsyncIterator[MakeWorld]:
    """`await scripted_world(harness={"name": …}, context=…)`: a gateway and four rollouts, with the engine as cell c0.

    `harness` is the run file's [harness] table; its dialect is the gateway's. Other keywords are further tables of the
    run file. `max_tokens` is the longest answer.
    """
    from tests.gateway.conftest import Served, World

    made: list[World] = []

    async def make(
        harness: dict[str, Any] | None = None, context: int = 65_536, max_tokens: int = 4096, **tables: Any
    ) -> World:
        fields: dict[str, Any] = {
            "name": "scripted",
            "steps": 1,
            "policy": {"path": scripted_policy, "context": context},
            "tasks": {"train": tmp_path},
            "serving": SERVING,
            "sampling": {"max_tokens": max_tokens},
            "harness": harness or {},
            "cells": [{"name": "c0", "central": True}, {"name": "c1"}],
        }
        run = RunConfig.model_validate({**fields, **tables})
        db = make_engine(database)
        with transaction(db) as s:
            create_run(s, run.run_id, run.model_dump(mode="json"), "wf")
            step = open_step(s, run.run_id, 0, 0)
            [group] = create_groups(s, [TaskRef("t/one", "/nowhere", "")], step_id=step)
            ids = create_rollouts(s, group, 4, temperature=1.0, harness=run.harness.name)
            tokens = [s.get_one(Rollout, i).token for i in ids]
        served = Served(run, database)
        await served.start()
        world = World(run, database, db, served, tokens, ids)
        made.append(world)
        world.cell(
            engine_url=scripted_engine.url,
            engine_incarnation=scripted_engine.incarnation,
            max_running=SERVING.max_running,
            serving_version=VERSION,
        )
        return world

    yield make
    for world in made:
        with contextlib.suppress(Exception):
            await world.served.stop()
        world.db.dispose()
