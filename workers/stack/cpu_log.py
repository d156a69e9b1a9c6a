"""Writes CPU samples to Postgres; what cannot be written now is written with the next sample."""

from __future__ import annotations

from collections import defaultdict

import psycopg

from workers.stack.cpu import Owner


class CpuLog:
    """One row of `cpu_samples` an owner, every `every_s` seconds."""

    def __init__(self, libpq_url: str, run_id: str | None, every_s: float = 2.0) -> None:
        self.every_s = every_s
        self._url = libpq_url
        self._run_id = run_id
        self._unwritten: dict[Owner, float] = defaultdict(float)

    async def add(self, seconds: dict[Owner, float]) -> None:
        """Write `seconds` and what is still unwritten; keep it where Postgres or its table is not there now."""
        for owner, used in seconds.items():
            self._unwritten[owner] += used
        rows = [(self._run_id, o.component, o.cell, used) for o, used in self._unwritten.items()]
        if not rows:
            return
        try:
            async with (
                await psycopg.AsyncConnection.connect(self._url, connect_timeout=2) as connection,
                connection.cursor() as cursor,
            ):
                await cursor.executemany(
                    "INSERT INTO cpu_samples (run_id, component, cell, cpu_s) VALUES (%s, %s, %s, %s)", rows
                )
        except (psycopg.OperationalError, psycopg.errors.UndefinedTable):
            return  # Postgres restarts, or is not migrated yet: the seconds wait
        self._unwritten.clear()
