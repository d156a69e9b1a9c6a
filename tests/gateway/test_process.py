"""The gateway as its own process: killed in mid-call, it comes back and the conversation goes on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gyre.ports import free_port
from gyre.serving.launch import EngineProcess
from tests.gateway.conftest import BASH, World
from tests.gateway.test_conversation_live import START, results
from tests.gateway.test_unbroken_live import until_running
from tests.settings import worker_settings


class Process:
    """`python -m workers.gateway`."""

    def __init__(self, world: World, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        settings = worker_settings(world.run, world.database, folder, gateway=self.url)
        self._env = {**os.environ, **settings.to_env()}
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        argv = [sys.executable, "-m", "workers.gateway"]
        self.process = subprocess.Popen(argv, env=self._env)  # noqa: ASYNC220 - returns at once
        async with asyncio.timeout(120), httpx.AsyncClient() as http:
            while True:
                assert self.process.poll() is None
                try:
                    await http.get(f"{self.url}/health")
                    return
                except httpx.TransportError:
                    await asyncio.sleep(0.1)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def process(live: World, tmp_path: Path) -> Iterator[Process]:
    made = Process(live, tmp_path)
    yield made
    made.kill()


async def test_kill_9_in_mid_call(live: World, sglang: EngineProcess, process: Process) -> None:
    await process.start()
    client = openai.AsyncOpenAI(base_url=f"{process.url}/r/{live.tokens[0]}/v1", api_key="x", max_retries=30)

    async def ask(messages: list[Any]) -> dict[str, Any]:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[BASH])
        return dict(answer.choices[0].message.model_dump(exclude_none=True))

    first = await ask(START)
    live.rollout(temperature=0.05)
    await asyncio.sleep(1.5)  # the gateway reads the rollout anew once a second
    history = [*START, first, *results(first)]
    call = asyncio.create_task(ask(history))
    await until_running(sglang, 1)
    await live.until(lambda: len(live.calls()) == 2)
    process.kill()
    await process.start()
    second = await call  # the client's own retry: the harness sees only time
    assert second["content"].count("ls ") == 398
    rows = live.calls()
    assert [c.status for c in rows] == ["complete", "incomplete", "complete"]
    assert rows[1].leaf_id is None
    assert (rows[2].fork_reason, rows[2].parent_call_id, rows[2].cells) == (None, rows[0].id, ["c0"])
    before = live.path(rows[0].leaf_id)
    assert live.path(rows[2].leaf_id)[: len(before)] == before


def test_a_missing_setting_is_one_line() -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("GYRE_")}
    done = subprocess.run([sys.executable, "-m", "workers.gateway"], env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("gyre: GYRE_DATABASE_URL is not set")
    assert len(done.stderr.splitlines()) == 1
