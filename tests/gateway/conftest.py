"""One real SGLang server for the folder, a gateway on a real port, and a rollout in a fresh Postgres."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn
from sqlalchemy import Engine, select, text

from gyre.config import CellConfig, PolicyConfig, RunConfig, ServingConfig
from gyre.gateway.app import Gateway, create_app
from gyre.gateway.policy import Policy
from gyre.gateway.sharding import ALONE, Shard
from gyre.harness.registry import dialect_of
from gyre.serving.launch import EngineProcess
from gyre.store.db import make_engine, transaction
from gyre.store.models import Call, Node, Rollout
from gyre.store.queries.cells import upsert_cell
from gyre.store.queries.groups import TaskRef, create_groups, create_rollouts
from gyre.store.queries.runs import create_run
from gyre.store.queries.steps import open_step
from gyre.store.tokens import unpack_ids
from tests.clients import openai_client
from tests.gateway.markov import write_policy
from tests.gateway.stand_in import StandIn

SERVING = ServingConfig(max_running=8, kv_tokens=16384, request_timeout_s=60.0)
CONTEXT = 2048
BASH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


@pytest.fixture(scope="session")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("markov"))


@pytest.fixture(scope="session")
def policy(policy_path: Path) -> Policy:
    """Its tokenising side, with room for long conversations."""
    return Policy(PolicyConfig(path=policy_path, context=100_000))


@pytest.fixture(scope="session")
def sglang(policy_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    process = EngineProcess(
        SERVING, CellConfig(name="c0"), tmp_path_factory.mktemp("engine") / "engine.log", context=CONTEXT
    )
    process.start(policy_path, version=3)
    try:
        asyncio.run(process.wait_ready())
        yield process
    finally:
        process.stop()


@pytest.fixture
def run(policy_path: Path, tmp_path: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "gw",
            "steps": 1,
            "policy": PolicyConfig(path=policy_path, context=CONTEXT),
            "tasks": {"train": tmp_path},
            "serving": SERVING,
            "sampling": {"max_tokens": 400},
            "cells": [{"name": "c0", "central": True}, {"name": "c1"}],
        }
    )


class Served:
    """An app under uvicorn on a free port, in this loop."""

    def __init__(self, run: RunConfig, database: str, patience_s: float = 60.0, shard: Shard = ALONE) -> None:
        app = create_app(run, database, dialect_of(run.harness), write_patience_s=patience_s, shard=shard)
        self.gateway: Gateway = app.state.gateway
        self._server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1, lifespan="on")
        )
        self._task: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started:
            assert not self._task.done(), self._task.exception()
            await asyncio.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._task is not None
        self._server.should_exit = True
        await self._task


@dataclass
class World:
    """A run with its rollouts, the gateway that serves them, and what Postgres has of both."""

    run: RunConfig
    database: str
    db: Engine
    served: Served
    tokens: list[str]
    ids: list[str]

    def cell(self, name: str = "c0", **values: Any) -> None:
        with transaction(self.db) as s:
            defaults = {"central": name == "c0", "role": "rollout", "max_running": 8, "serving_version": 3}
            known = values if values.pop("known", False) else {**defaults, "routable": True, **values}
            upsert_cell(s, self.run.run_id, name, **known)

    def rollout(self, member: int = 0, **values: Any) -> None:
        with transaction(self.db) as s:
            row = s.get_one(Rollout, self.ids[member])
            for column, value in values.items():
                setattr(row, column, value)

    def client(self, member: int = 0, **options: Any) -> openai.AsyncOpenAI:
        url = f"{self.served.url}/r/{self.tokens[member]}/v1"
        return openai_client(url, **options)

    def calls(self, member: int = 0) -> list[Call]:
        with transaction(self.db) as s:
            return list(s.scalars(select(Call).where(Call.rollout_id == self.ids[member]).order_by(Call.seq)))

    def node(self, node_id: int | None) -> Node:
        assert node_id is not None
        with transaction(self.db) as s:
            return s.get_one(Node, node_id)

    def path(self, leaf_id: int | None) -> list[int]:
        """The ids from the root to the end of a node."""
        with transaction(self.db) as s:
            spans = s.execute(text("SELECT token_ids FROM path_nodes(:leaf)"), {"leaf": leaf_id}).scalars()
            return unpack_ids(b"".join(spans)).tolist()

    async def restart(self) -> None:
        """A new gateway in place of the old one, as after its death."""
        await self.served.stop()
        self.served = Served(self.run, self.database)
        await self.served.start()

    async def until(self, condition: Any, timeout_s: float = 60.0) -> None:
        """Wait until `condition()` holds."""
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - what is awaited is in another process
                await asyncio.sleep(0.02)


@pytest.fixture
async def world(run: RunConfig, database: str) -> AsyncIterator[World]:
    """A gateway without a cell yet, and four rollouts (min_version 0, temperature 1)."""
    db = make_engine(database)
    with transaction(db) as s:
        create_run(s, run.run_id, run.model_dump(mode="json"), "wf")
        step = open_step(s, run.run_id, 0, 0)
        [group] = create_groups(s, [TaskRef("t/one", "/nowhere", "")], step_id=step)
        ids = create_rollouts(s, group, 4, temperature=1.0, harness="none")
        tokens = [s.get_one(Rollout, i).token for i in ids]
    served = Served(run, database)
    await served.start()
    made = World(run, database, db, served, tokens, ids)
    yield made
    with contextlib.suppress(Exception):
        await made.served.stop()
    db.dispose()


@pytest.fixture
async def live(world: World, sglang: EngineProcess) -> World:
    """`world`, with the engine as cell c0."""
    world.cell(engine_url=sglang.url, engine_incarnation=sglang.incarnation)
    return world


@pytest.fixture
async def stand_in(world: World) -> AsyncIterator[StandIn]:
    """Serves as the cell c0 of `world`, without an engine."""
    async with StandIn() as made:
        world.cell(engine_url=made.url, engine_incarnation="stand-in")
        yield made
