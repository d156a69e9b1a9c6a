"""An agent whose trainer is real and whose engine never starts. Free of Megatron: its trainer has that."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from activities.cell import CellActivities
from activities.cell_site import CellSite, Programs
from activities.cell_work import Work
from gyre.store.db import make_engine
from workers.settings import WorkerSettings

PROGRAMS = Programs(trainer="tests.cells.deadly")
CENTRAL, SATELLITE = "alpha", "beta"


class Agent:
    """An agent's part that trains: its site, and the tasks that keep its trainer and its row."""

    def __init__(self, settings: WorkerSettings, cell: str) -> None:
        self._engine = make_engine(settings.database_url, stopped_s=2.0)
        self.site = CellSite(
            settings.run, cell, self._engine, host=settings.host,
            logs=settings.logs, sockets=settings.sockets, env=settings.to_env(), programs=PROGRAMS,
        )  # fmt: skip
        self.activities = CellActivities(self.site)
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        await self.site.take()
        await self.site.set_role("train")
        self._tasks = [
            asyncio.create_task(self.site.trainer.keep(self.site.report)),
            asyncio.create_task(self.site._beat()),
        ]
        async with asyncio.timeout(300):  # the zygote may have to import first
            await self.site.trainer.ready.wait()
        await self.site.report()

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[Work]:
        """Its training loop, for as long as the block."""
        work = Work(self.site)
        running = asyncio.create_task(work.run())
        try:
            yield work
        finally:
            work.stop.set()
            await running

    def sleep(self) -> None:
        """It does not even beat any more; what it awaits, it goes on awaiting."""
        self._tasks[1].cancel()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.site.trainer.stop)
        self._engine.dispose()
