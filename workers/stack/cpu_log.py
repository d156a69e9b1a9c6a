"""Writes CPU samples to Postgres; what cannot be written now is written with the next sample."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from sqlalchemy.exc import OperationalError, ProgrammingError

from gyre.store.db import make_engine, transaction
from gyre.store.queries.cells import CpuUse, add_cpu_samples
from workers.stack.cpu import Owner


class CpuLog:
    """One row of `cpu_samples` an owner, every `every_s` seconds."""

    def __init__(self, database_url: str, run_id: str | None, every_s: float = 2.0) -> None:
        self.every_s = every_s
        self._engine = make_engine(database_url, pool_size=1)
        self._run_id = run_id
        self._unwritten: dict[Owner, float] = defaultdict(float)

    async def add(self, seconds: dict[Owner, float]) -> None:
        """Write `seconds` and what is still unwritten; keep it where Postgres or its table is not there now."""
        for owner, used in seconds.items():
            self._unwritten[owner] += used
        samples = [CpuUse(owner.component, used, owner.cell) for owner, used in self._unwritten.items()]
        if not samples:
            return
        if await asyncio.to_thread(self._write, samples):
            self._unwritten.clear()

    def _write(self, samples: list[CpuUse]) -> bool:
        try:
            with transaction(self._engine) as session:
                add_cpu_samples(session, self._run_id, samples)
        except (OperationalError, ProgrammingError):
            return False  # Postgres restarts, or is not migrated yet: the seconds wait
        return True
