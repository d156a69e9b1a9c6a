"""One real SGLang server for all tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gyre.config import CellConfig, ServingConfig
from gyre.serving.client import EngineClient
from gyre.serving.launch import EngineProcess
from tests.serving.tiny_policy import write_policy

SERVING = ServingConfig(max_running=16, kv_tokens=8192)
CELL = CellConfig(name="c0")


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"), seed=0)


@pytest.fixture(scope="session")
def engine(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    process = EngineProcess(SERVING, CELL, tmp_path_factory.mktemp("engine") / "engine.log", context=2048)
    process.start(policy, version=0)
    try:
        asyncio.run(process.wait_ready())
        yield process
    finally:
        process.stop()


@pytest.fixture
async def client(engine: EngineProcess) -> AsyncIterator[EngineClient]:
    async with EngineClient(engine.url) as client:
        yield client
