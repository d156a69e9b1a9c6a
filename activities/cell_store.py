"""What a cell's agent reads and writes in Postgres; what it writes, it writes as the cell's agent or not at all."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar, Unpack

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from gyre.config import RunConfig
from gyre.store import queries as q
from gyre.store.db import transaction
from gyre.store.models import WeightVersion
from gyre.store.queries import FencedError

log = logging.getLogger("gyre.cell")

T = TypeVar("T")

OUTAGE_S = 120.0
"""How long a database that does not answer is waited for, before it counts as an error."""
LOST_AFTER_S = 60.0
"""Silence of an agent after which its trainer counts as dead, and what that held is queued again."""


@dataclass(frozen=True)
class OpenStep:
    """The step that is trained now."""

    id: int
    index: int
    progress: q.StepProgress


class CellStore:
    """Short transactions of one cell, on threads, so that the agent's event loop never waits for a disk.

    Whatever they do may run again: a lost connection is tried anew for OUTAGE_S seconds.
    """

    def __init__(self, engine: Engine, run: RunConfig, cell: str) -> None:
        self._engine, self.run, self._cell = engine, run, cell
        self.run_id = run.run_id
        self.epoch = 0
        """The epoch in which this agent has the cell; 0: it has not taken it."""
        self._fenced: FencedError | None = None
        self._knows = asyncio.Event()
        self._away = False
        """Whether the database does not answer."""

    async def take(self, *, central: bool, max_running: int) -> int:
        """Become the cell's agent: from now on nobody else can commit for it. The epoch."""

        def take(s: Session) -> int:
            q.create_run(s, self.run_id, self.run.model_dump(mode="json"), self.run_id)
            return q.take_cell(s, self.run_id, self._cell, central=central, max_running=max_running)

        self.epoch = await self.look(take)
        return self.epoch

    async def do(self, work: Callable[[Session], T]) -> T:
        """`work` in one transaction. Raises FencedError, and nothing is changed, where another agent has the cell."""

        def fenced(s: Session) -> T:
            q.check_epoch(s, self.run_id, self._cell, self.epoch)
            return work(s)

        return await self._fence(fenced)

    async def report(self, **values: Unpack[q.CellUpdate]) -> None:
        """Write into the cell's row. Raises as `do`."""

        def fenced(s: Session) -> None:
            q.check_epoch(s, self.run_id, self._cell, self.epoch, exclusive=True)
            q.upsert_cell(s, self.run_id, self._cell, **values)

        await self._fence(fenced)

    async def _fence(self, work: Callable[[Session], T]) -> T:
        try:
            return await self.look(work)
        except FencedError as error:
            self._fenced = error
            self._knows.set()
            raise

    async def until_fenced(self) -> NoReturn:
        """Wait until this agent has learned that another one has the cell. Raises FencedError."""
        await self._knows.wait()
        assert self._fenced is not None
        raise self._fenced

    async def look(self, work: Callable[[Session], T]) -> T:
        """`work`, which only reads, in one transaction."""
        deadline = time.monotonic() + OUTAGE_S
        pause = 0.1
        while True:
            try:
                found = await asyncio.to_thread(self._once, work)
            except DBAPIError as error:
                lost = isinstance(error, OperationalError) or error.connection_invalidated
                if not lost or time.monotonic() > deadline:
                    raise
                if not self._away:  # it is asked again and again, from several sides
                    log.warning("the database does not answer, it is waited for: %s", str(error).splitlines()[0])
                self._away = True
            else:
                if self._away:
                    log.info("the database answers again")
                self._away = False
                return found
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    def _once(self, work: Callable[[Session], T]) -> T:
        with transaction(self._engine) as session:
            return work(session)

    async def newest_version(self) -> tuple[int, Path, WeightVersion | None]:
        """The newest durable version, its folder, and its row; before the first row, version 0: the policy itself."""
        row = await self.look(lambda s: q.newest_version(s, self.run_id))
        if row is None:
            return 0, self.run.policy.path, None
        return row.version, Path(row.checkpoint), row

    async def open_step(self) -> OpenStep | None:
        """The oldest step whose optimizer step is not done."""

        def find(s: Session) -> OpenStep | None:
            step_id = q.oldest_unfinished_step(s, self.run_id)
            if step_id is None:
                return None
            return OpenStep(step_id, q.step_row(s, step_id).index, q.step_progress(s, step_id))

        return await self.look(find)

    async def requeue_lost(self, step_id: int, mine: str | None) -> None:
        """Queue again what dead trainers claimed or held; `mine` lives, whatever its row says."""

        def requeue(s: Session) -> int:
            living = q.living_trainers(s, self.run_id, LOST_AFTER_S)
            return q.requeue_lost(s, step_id, living | ({mine} if mine else set()))

        if lost := await self.do(requeue):
            log.warning("step row %d: %d micro-batches of dead trainers are queued again", step_id, lost)
