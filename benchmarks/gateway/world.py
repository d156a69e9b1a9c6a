"""A run with rollouts in a fresh Postgres, the gateway's own process in front of it, and a client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import psutil
from tokenizers import Tokenizer

from benchmarks.gateway.engine import Engine, content_length
from gyre.config import RunConfig
from gyre.ports import free_port
from gyre.store.db import make_engine, transaction
from gyre.store.migrate import upgrade
from gyre.store.models import Rollout
from gyre.store.queries.cells import upsert_cell
from gyre.store.queries.groups import TaskRef, create_groups, create_rollouts
from gyre.store.queries.runs import create_run
from gyre.store.queries.steps import open_step
from gyre.store.server import PostgresServer
from tests.scripted.policy import write_policy
from tests.settings import worker_settings

CONTEXT = 2_000_000
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Execute a bash command",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
# A line of what tools print, of some 20 tokens.
LINE = "    for index, value in enumerate(self._values, start=1):  # {}\n"


@dataclass
class World:
    run: RunConfig
    tokenizer: Tokenizer
    url: str
    process: psutil.Process
    postgres: Path
    tokens: list[str]
    """Tokens of rollouts that nobody used yet."""

    def base(self) -> str:
        """The URL of a fresh rollout."""
        return f"{self.url}/r/{self.tokens.pop()}/v1"


def config(policy: Path, folder: Path, max_running: int = 256) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "bench",
            "steps": 1,
            "policy": {"path": policy, "context": CONTEXT},
            "tasks": {"train": folder},
            "serving": {"max_running": max_running},
            "cells": [{"name": "c0", "central": True}],
        }
    )


@contextlib.asynccontextmanager
async def world(engine_of: Any, rollouts: int) -> AsyncIterator[tuple[World, Engine]]:
    """The gateway's process with `rollouts` rollouts; `engine_of(tokenizer)` is the one cell's engine."""
    with tempfile.TemporaryDirectory() as name, PostgresServer(Path(name) / "postgres") as server:
        folder = Path(name)
        policy = write_policy(folder / "policy", CONTEXT)
        tokenizer = Tokenizer.from_file(str(policy / "tokenizer.json"))
        engine: Engine = engine_of(tokenizer)
        await engine.start()
        run = config(policy, folder)
        upgrade(server.url)
        db = make_engine(server.url)
        with transaction(db) as s:
            create_run(s, run.run_id, run.model_dump(mode="json"), "wf")
            [group] = create_groups(s, [TaskRef("t/one", "/nowhere", "")], step_id=open_step(s, run.run_id, 0, 0))
            ids = create_rollouts(s, group, rollouts, temperature=1.0, harness="none")
            tokens = [s.get_one(Rollout, i).token for i in ids]
            upsert_cell(s, run.run_id, "c0", central=True, role="rollout", max_running=256, serving_version=0,
                        routable=True, engine_url=engine.url, engine_incarnation="one")  # fmt: skip
        db.dispose()
        url = f"http://127.0.0.1:{free_port()}"
        settings = worker_settings(run, server.url, folder, gateway=url)
        environment = {**os.environ, **settings.to_env()}
        process = subprocess.Popen([sys.executable, "-m", "workers.gateway"], env=environment)  # noqa: ASYNC220
        try:
            await until_up(process, f"{url}/health")
            postgres = Path(name) / "postgres"
            yield World(run, tokenizer, url, psutil.Process(process.pid), postgres, tokens), engine
        finally:
            process.terminate()
            process.wait()
            await engine.stop()


async def until_up(process: subprocess.Popen[bytes], health: str) -> None:
    """Wait for a server. Raises RuntimeError where it ended, or does not answer for a minute."""
    deadline = time.monotonic() + 60
    async with aiohttp.ClientSession() as http:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(health) as answer:
                    if answer.status == 200:
                        return
            time.sleep(0.05)  # noqa: ASYNC251 - nothing else runs yet
    raise RuntimeError(f"no server answers at {health}")


def cpu(process: psutil.Process) -> float:
    """CPU seconds of a process."""
    times = process.cpu_times()
    return float(times.user + times.system)


def postgres_cpu(folder: Path) -> float:
    """CPU seconds of a Postgres, its ended children included."""
    parent = psutil.Process(int((folder / "data" / "postmaster.pid").read_text().splitlines()[0]))
    total = cpu(parent) + parent.cpu_times().children_user + parent.cpu_times().children_system
    for child in parent.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            total += cpu(child)
    return float(total)


class Client(asyncio.Protocol):
    """One HTTP connection that does as little as can be: what it costs would be taken for the server's."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[bytes] | None = None
        self._got = bytearray()
        self._end = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    async def post(self, url: str, body: bytes) -> bytes:
        """The body of the answer. Raises RuntimeError for any status but 200."""
        parts = urlsplit(url)
        if self._answer is None:
            await asyncio.get_running_loop().create_connection(lambda: self, parts.hostname, parts.port)
        self._answer = asyncio.get_running_loop().create_future()
        head = f"POST {parts.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        self._transport.writelines([head.encode() + b"\r\n\r\n", body])
        return await self._answer

    def data_received(self, data: bytes) -> None:
        self._got += data
        if not self._end and (head := self._got.find(b"\r\n\r\n")) >= 0:
            self._head = bytes(self._got[:head])
            self._end = head + 4 + content_length(self._head)
        if self._end and len(self._got) >= self._end:
            body = bytes(self._got[len(self._head) + 4 : self._end])
            del self._got[: self._end]
            self._end = 0
            assert self._answer is not None
            if self._head.split(b" ", 2)[1] == b"200":
                self._answer.set_result(body)
            else:
                self._answer.set_exception(RuntimeError(f"{self._head.splitlines()[0]!r}: {body[:500]!r}"))


class Agent:
    """One conversation: each turn sends all of it, as harnesses do."""

    def __init__(self, base: str, system: str, task: str) -> None:
        self._http, self._url = Client(), f"{base}/chat/completions"
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": system},
            {"role": "user", "content": task},
        ]
        self.body = b""

    def prepare(self) -> None:
        """Write the next request's body."""
        self.body = orjson.dumps({"model": "policy", "messages": self.messages, "tools": TOOLS})

    async def turn(self, result: str) -> None:
        """Send what `prepare` wrote; then the answer and `result`, the output of its tool, are part of the history."""
        message = orjson.loads(await self._http.post(self._url, self.body))["choices"][0]["message"]
        self.messages.append(message)
        for call in message["tool_calls"]:
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def lines(count: int, salt: int) -> str:
    """Output of a tool, in lines that differ."""
    return "".join(LINE.format(salt * 1000 + i) for i in range(count))
