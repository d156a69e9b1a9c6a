"""What the agent believes of its engine when an order breaks off half-way; a scripted server stands for SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from activities.cell_engine import CellEngine
from activities.cell_store import CellStore
from gyre.config import CellConfig, RunConfig
from gyre.serving.client import EngineClient, EngineError
from gyre.serving.launch import EngineProcess
from tests.serving.test_client import server as server_of


class Server:
    """Records what it is told; the orders in `fails` fail once."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.fails: list[str] = []
        self.generates = True
        self.loading = asyncio.Event()
        self.runs = 0
        self.looked, self.waits = asyncio.Event(), asyncio.Event()
        self.late = 0
        """Requests that come just before the next update."""
        self.half_updated = False

    async def _told(self, order: str) -> None:
        self.told.append(order)
        if order in self.fails:
            self.fails.remove(order)
            raise EngineError(f"{order}: no answer")

    async def pause(self, mode: str) -> None:
        await self._told("pause")
        self.generates = False

    async def resume(self) -> None:
        await self._told("resume")
        self.generates = True

    async def release_memory(self) -> None:
        self.loading.set()
        await asyncio.sleep(0.05)
        await self._told("release_memory")

    async def resume_memory(self) -> None:
        await self._told("resume_memory")

    async def wait_empty(self, timeout_s: float) -> bool:
        self.waits.set()
        async with asyncio.timeout(60):
            while self.runs and timeout_s > 0:
                await asyncio.sleep(0.01)
                timeout_s -= 0.01
        return not self.runs

    async def running_requests(self) -> int:
        return self.runs

    async def update_weights_from_disk(self, folder: Path, version: int, *, idle: bool = False) -> bool:
        self.loading.set()
        await asyncio.sleep(0.05)
        self.runs += self.late
        self.late = 0
        if idle and self.runs:
            await self._told("not idle")
            self.looked.set()
            return False
        await self._told(f"weights {version}")
        return True


class Store:
    """The newest version, and the run."""

    def __init__(self, run: RunConfig) -> None:
        self.run, self.newest, self.folder = run, 0, run.policy.path

    async def newest_version(self) -> tuple[int, Path, Any]:
        return self.newest, self.folder, None


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(
        RunConfig.model_validate(
            {
                "name": "half",
                "steps": 1,
                "policy": {"path": str(tmp_path)},
                "tasks": {"train": str(tmp_path)},
                "cells": [{"name": "c0", "central": True}],
            }
        )
    )


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
def engine(store: Store, server: Server, tmp_path: Path) -> CellEngine:
    engine = CellEngine(cast(CellStore, store), CellConfig(name="c0"), tmp_path / "engine.log")
    engine._client, engine.version = cast(EngineClient, server), 0
    return engine


async def test_an_engine_whose_resume_broke_off_generates_after_the_next(engine: CellEngine, server: Server) -> None:
    await engine.release()
    server.fails = ["resume"]
    with pytest.raises(EngineError):
        await engine.resume()
    assert await engine.resume() == 0
    assert server.generates
    assert server.told.count("resume_memory") == 1  # SGLang dies of a second one


async def test_an_engine_whose_release_broke_off_generates_when_it_serves_again(
    engine: CellEngine, server: Server
) -> None:
    server.fails = ["release_memory"]
    with pytest.raises(EngineError):
        await engine.release()
    assert await engine.resume() == 0
    assert server.generates and "resume_memory" not in server.told


async def test_a_device_that_gave_its_memory_takes_its_weights_anew(
    store: Store, server: Server, tmp_path: Path
) -> None:
    """On CUDA what the memory holds after a resume is undefined, also where no newer version came meanwhile."""
    for devices, told in (([0], ["weights 0"]), ([], [])):
        server.told.clear()
        cell = CellConfig(name="c0", devices=devices)
        engine = CellEngine(cast(CellStore, store), cell, tmp_path / "engine.log")
        engine._client, engine.version = cast(EngineClient, server), 0
        await engine.release()
        assert await engine.resume() == 0
        assert server.told == ["pause", "release_memory", "resume_memory", "resume", *told]


async def test_a_checkpoint_that_is_not_on_this_machine_ends_no_server(
    engine: CellEngine, store: Store, server: Server
) -> None:
    store.newest, store.folder = 1, Path("/nowhere/v1")
    with pytest.raises(EngineError, match=r"checkpoint /nowhere/v1 is not there on this machine; have the run's machi"):
        await engine.load(1)
    assert engine.version == 0 and not server.told


async def test_a_cancelled_load_is_finished(engine: CellEngine, store: Store, server: Server) -> None:
    store.newest = 1
    loading = asyncio.create_task(engine.load(1))
    await server.loading.wait()
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert await engine.load(1) == 1  # waits for the one before, and has nothing left to do
    assert server.told == ["weights 1"]


async def test_a_cancelled_release_is_finished(engine: CellEngine, server: Server) -> None:
    releasing = asyncio.create_task(engine.release())
    await server.loading.wait()
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    await engine.release()
    assert engine.released and server.told == ["pause", "release_memory"]


class Sleeper(EngineProcess):
    """A process that can be ended, in the place of SGLang's."""

    def command(self, policy_path: Path, port: int, version: int) -> tuple[list[str], dict[str, str]]:
        return ["sleep", "infinity"], {}


@pytest.fixture
def living(engine: CellEngine, store: Store, tmp_path: Path) -> Iterator[CellEngine]:
    """An engine that serves version 0 where 1 is the newest, with a process."""
    engine.process = Sleeper(store.run.serving, CellConfig(name="c0"), tmp_path / "sleeper.log")
    engine.process.start(tmp_path)
    engine.ready.set()
    store.newest = 1
    yield engine
    engine.process.stop()


async def test_a_server_whose_answer_to_new_weights_makes_no_sense_is_ended(living: CellEngine) -> None:
    answers = {"/update_weights_from_disk": b"half an ans"}
    async with server_of(drops=0, answers=answers) as (url, asked), EngineClient(url) as client:
        living._client = client
        with pytest.raises(ValueError, match="Expecting value"):
            await living.load(1)
    assert asked[-1].startswith("POST /update_weights_from_disk")
    assert not living.ready.is_set() and not living.process.alive and living.version == 0


async def test_a_server_that_is_left_in_the_middle_of_new_weights_is_ended(living: CellEngine) -> None:
    """The agent's loop ends, and takes the change with it."""
    ordered = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        ordered.set()
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(silent, "127.0.0.1")
    async with listening, EngineClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}") as client:
        living._client = client
        loading = asyncio.create_task(living._load(1))
        await ordered.wait()
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
    assert not living.ready.is_set() and not living.process.alive


async def test_a_server_that_was_told_nothing_serves_on(living: CellEngine, server: Server) -> None:
    """What breaks off before the first order is no reason to lose a server: the database cannot be told, say."""
    finishes(living, limit_s=60)

    async def fails() -> None:
        raise ConnectionError("no database")

    living._changed = fails
    with pytest.raises(ConnectionError):
        await living.load(1)
    assert living.ready.is_set() and living.process.alive and living.admits and not server.told


def finishes(engine: CellEngine, limit_s: float) -> list[bool]:
    """Have the engine let calls end before new weights; what `admits` was at each of its reports."""
    run = engine._store.run
    serving = run.serving.model_copy(update={"on_update": "finish", "finish_limit_s": limit_s})
    engine._store.run = run.model_copy(update={"serving": serving})
    engine.ready.set()
    seen: list[bool] = []

    async def changed() -> None:
        seen.append(engine.admits)

    engine._changed = changed
    return seen


async def test_calls_end_before_new_weights_and_none_begins(engine: CellEngine, store: Store, server: Server) -> None:
    seen = finishes(engine, limit_s=60)
    store.newest, server.runs = 1, 2
    loading = asyncio.create_task(engine.load(1))
    await server.waits.wait()
    assert seen == [False] and engine.version == 0 and not server.told  # nothing new while two calls run
    server.runs, server.late = 0, 1  # they end, and one comes that the gateway sent before it heard
    await server.looked.wait()
    assert not engine.admits
    server.runs = 0
    assert await loading == 1
    assert server.told == ["not idle", "weights 1"] and engine.admits


async def test_an_endless_call_does_not_hold_new_weights_back(
    engine: CellEngine, store: Store, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    finishes(engine, limit_s=0.05)
    store.newest, server.runs = 1, 1
    assert await engine.load(1) == 1
    assert server.told == ["weights 1"] and engine.admits
    assert "1 calls run after 0 s; they go on under new weights" in caplog.text
