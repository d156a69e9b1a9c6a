"""The gateway as its own process: killed in mid-call, it comes back and the conversation goes on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gyre.ports import free_port
from gyre.serving.launch import EngineProcess
from tests.clients import http_client, openai_client
from tests.gateway.conftest import BASH, World
from tests.gateway.proxy import Proxy
from tests.gateway.test_conversation_live import START, ask, results
from tests.gateway.test_unbroken_live import FIRST_TOKENS
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
        async with asyncio.timeout(120), http_client() as http:
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
    """The engine's answer is held, so that it does not end before the gateway does."""
    first, _, _ = await ask(live, START)
    live.rollout(temperature=0.05)
    history = [*START, first, *results(first)]
    async with Proxy(sglang.url, hold_after=FIRST_TOKENS) as proxy:
        live.cell(engine_url=proxy.url, engine_incarnation="behind the proxy")
        await process.start()
        async with openai_client(f"{process.url}/r/{live.tokens[0]}/v1", max_retries=100) as client:
            call = asyncio.create_task(
                client.chat.completions.create(model="policy", messages=history, tools=[BASH])  # type: ignore[arg-type]
            )
            await asyncio.wait_for(proxy.held.wait(), 300)
            await live.until(lambda: len(live.calls()) == 2)
            proxy.hold_after = None
            process.kill()
            await process.start()
            second = (await call).choices[0].message  # the client's own retry: the harness sees only time
    assert (second.content or "").count("ls ") == 398
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
