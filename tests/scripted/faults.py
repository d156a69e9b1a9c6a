"""Everything that happens to cells and gateways, at random, while a rollout goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from typing import TYPE_CHECKING

import httpx
from sqlalchemy import func, select

from gyre.serving.client import EngineClient, EngineError
from gyre.store.db import transaction
from gyre.store.models import Call
from tests.clients import http_client
from tests.scripted.engine import ScriptedEngine
from tests.scripted.gateway import GatewayProcess

if TYPE_CHECKING:
    from tests.gateway.conftest import World

# Seconds that a cell is away, or hangs: from, to. A hang is longer than the gateway's patience with silence.
AWAY_S = (0.2, 1.5)
HANG_S = (3.0, 4.0)


class Faults:
    """The cells `engines` (by name) and the gateway of a world; each fault is chosen and timed by `seed`."""

    def __init__(self, world: World, engines: dict[str, ScriptedEngine], gateway: GatewayProcess, seed: int) -> None:
        self._world, self._engines, self._gateway = world, engines, gateway
        self._random = random.Random(seed)
        self._version = max(e.version for e in engines.values())
        self.done: Counter[str] = Counter()
        self._busy: list[str] = []

    def plan(self, kinds: list[str], calls: int) -> list[tuple[int, str]]:
        """All of `kinds`, in random order, each at a random one of the first 4/5 of `calls` calls (counted from 0):
        what waits for another fault's end comes later."""
        places = sorted(self._random.sample(range(1, calls * 4 // 5), len(kinds)))
        return list(zip(places, self._random.sample(kinds, len(kinds)), strict=True))

    def register(self, name: str) -> None:
        """Tell the gateway of a cell's engine, as its agent does."""
        engine = self._engines[name]
        self._world.cell(
            name, engine_url=engine.url, engine_incarnation=engine.incarnation, serving_version=engine.version,
            max_running=16,
        )  # fmt: skip

    async def inject(self, plan: list[tuple[int, str]]) -> None:
        """Each fault once the calls before its own are complete and an engine is at work, some time later; returns when
        all is whole again."""
        healing: list[asyncio.Task[None]] = []
        for place, kind in plan:
            while self._calls() < place:  # noqa: ASYNC110 - what is awaited is in another process
                await asyncio.sleep(0.02)
            await self._until_busy()
            await asyncio.sleep(self._random.uniform(0, 0.5))
            healing.append(asyncio.create_task(getattr(self, kind.replace(" ", "_"))()))
            self.done[kind] += 1
        await asyncio.gather(*healing)

    def _calls(self) -> int:
        complete = (Call.rollout_id.in_(self._world.ids), Call.status == "complete")
        with transaction(self._world.db) as s:
            return int(s.scalar(select(func.count()).select_from(Call).where(*complete)) or 0)

    async def _until_busy(self) -> None:
        """Wait until a cell has a call; the gateway may be away."""
        async with http_client(self._gateway.url) as http:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    cells = (await http.get("/admin/cells")).json()["cells"]
                    self._busy = [c["name"] for c in cells if c["running"]]
                    if self._busy:
                        return
                await asyncio.sleep(0.02)

    def _any(self) -> str:
        """A cell; three times of four one that was at work."""
        return self._random.choice(self._busy if self._random.random() < 0.75 else sorted(self._engines))

    async def switch(self) -> None:
        """A cell leaves for another role, and comes back."""
        name = self._any()
        self._world.cell(name, known=True, routable=False)
        await asyncio.sleep(self._random.uniform(*AWAY_S))
        self._world.cell(name, known=True, routable=True)

    async def hang(self) -> None:
        """An engine takes what comes and gives nothing."""
        engine = self._engines[self._any()]
        assert engine.pid is not None
        group = engine.pid
        with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
            os.killpg(group, signal.SIGSTOP)
            await asyncio.sleep(self._random.uniform(*HANG_S))
            os.killpg(group, signal.SIGCONT)

    async def update(self) -> None:
        """New weights, in mid-generation."""
        name = self._any()
        engine = self._engines[name]
        self._version += 1
        version = self._version
        with contextlib.suppress(Exception):  # the engine hangs or is gone; its agent would start it anew
            async with EngineClient(engine.url, timeout_s=20.0) as client:
                try:
                    await client.update_weights_from_disk(engine.policy, version)
                except EngineError:
                    await client.resume()  # it was left paused, and no agent is here to start it anew
                    raise
            engine.version = version
            self._world.cell(name, known=True, serving_version=version)

    async def kill_engine(self) -> None:
        """kill -9, and a new one after a while."""
        name = self._any()
        engine = self._engines[name]
        assert engine.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)
        await asyncio.sleep(self._random.uniform(*AWAY_S))
        self._version += 1
        engine.start(version=self._version)
        await engine.wait_ready()
        self.register(name)

    async def kill_gateway(self) -> None:
        """kill -9, and a new one."""
        await self._gateway.stop()
        await asyncio.sleep(self._random.uniform(*AWAY_S))
        await self._gateway.start()
