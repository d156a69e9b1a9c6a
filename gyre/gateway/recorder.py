"""Writes of calls and nodes to Postgres, many calls in one transaction, tried again while Postgres is away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import psycopg
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnection
from sqlalchemy.ext.asyncio import AsyncEngine

from gyre.gateway.errors import GatewayError
from gyre.gateway.metrics import Metrics
from gyre.store.call_writer import CallWriter
from gyre.store.gateway_queries import CallWrite, reserve_ids

log = logging.getLogger(__name__)
T = TypeVar("T")

ID_BLOCK = 256
RETRY_S = (0.1, 2.0)
# Seconds for which the row of a call that begins waits for a transaction that is needed anyway.
COMPANY_S = 0.1
# Postgres is away, or so slow that the pool has no connection free: there is a next time.
AWAY = (
    OperationalError,
    InterfaceError,
    NoConnection,
    psycopg.OperationalError,
    psycopg.InterfaceError,
    OSError,
)


class Recorder:
    """Accepts writes in order; `write` returns after the commit.

    `patience_s`: seconds that a write is tried again while Postgres is away, before the call fails with 503.
    """

    def __init__(self, engine: AsyncEngine, metrics: Metrics, patience_s: float = 60.0) -> None:
        self.engine = engine
        self._writer = CallWriter(engine.url.render_as_string(hide_password=False))
        self._metrics = metrics
        self.patience_s = patience_s
        self._queue: asyncio.Queue[tuple[CallWrite, asyncio.Future[None], float]] = asyncio.Queue()
        self._ids: dict[str, list[int]] = {"calls": [], "nodes": []}
        self._refill = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to write."""
        self._task = asyncio.create_task(self._run(), name="gateway recorder")

    async def stop(self) -> None:
        """Write what is queued, then end."""
        if self._task is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await self._queue.join()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._writer.close()

    async def new_id(self, table: str) -> int:
        """A fresh id for a row of `calls` or `nodes`. Raises GatewayError (503) when Postgres stays away."""
        ids = self._ids[table]
        if not ids:
            async with self._refill:
                if not ids:
                    ids += await self.retried(lambda: reserve_ids(self.engine, table, ID_BLOCK))
                    ids.reverse()
        return ids.pop()

    async def retried(self, read: Callable[[], Awaitable[T]]) -> T:
        """`await read()`, tried again while Postgres is away. Raises GatewayError (503) when its patience ends."""
        deadline = asyncio.get_running_loop().time() + self.patience_s
        pause = RETRY_S[0]
        while True:
            try:
                return await read()
            except AWAY as error:
                if asyncio.get_running_loop().time() + pause > deadline:
                    raise away(error) from error
                self._metrics.write_retries.inc()
            await asyncio.sleep(pause)
            pause = min(pause * 2, RETRY_S[1])

    def post(self, write: CallWrite) -> asyncio.Future[None]:
        """Queue a write; the future is done after its commit, or fails with GatewayError."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._queue.put_nowait((write, done, loop.time() + self.patience_s))
        return done

    async def write(self, write: CallWrite) -> None:
        """`post`, and wait for the commit."""
        await self.post(write)

    async def _run(self) -> None:
        while True:
            batch = [await self._queue.get()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COMPANY_S):
                    await self._fill(batch)
            try:
                await self._commit(batch)
            finally:
                for _ in batch:
                    self._queue.task_done()

    async def _fill(self, batch: list[tuple[CallWrite, asyncio.Future[None], float]]) -> None:
        """Add what is queued, and go on until somebody waits for the commit: nobody does for a row that begins."""
        while True:
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            if any(write.end is not None for write, _, _ in batch):
                return
            batch.append(await self._queue.get())

    async def _commit(self, batch: list[tuple[CallWrite, asyncio.Future[None], float]]) -> None:
        """Commit the batch; where one of its rows is bad, each on its own, so that only the bad one fails."""
        pause = RETRY_S[0]
        while batch:
            try:
                await self._writer.write([write for write, _, _ in batch])
                _settle(batch, None)
                return
            except AWAY as error:
                self._metrics.write_retries.inc()
                now = asyncio.get_running_loop().time()
                _settle([item for item in batch if item[2] <= now + pause], away(error))
                batch = [item for item in batch if item[2] > now + pause]
                if batch:
                    log.warning("Postgres is away (%s); %d writes wait", first_line(error), len(batch))
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, RETRY_S[1])
            except Exception as error:  # whatever it is, the next call's write must not wait for ever
                if len(batch) == 1:
                    log.exception("a call could not be recorded")
                    _settle(batch, GatewayError("internal", f"the call could not be recorded: {first_line(error)}"))
                    return
                for item in batch:
                    await self._commit([item])
                return


def away(error: Exception) -> GatewayError:
    """Postgres did not come back in time."""
    return GatewayError("unavailable", f"the gateway's database does not answer ({first_line(error)}); try again")


def first_line(error: Exception) -> str:
    """What an error says, in one line; its type where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _settle(batch: list[tuple[CallWrite, asyncio.Future[None], float]], error: Exception | None) -> None:
    for _, done, _ in batch:
        if done.done():
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
            done.exception()  # a begin row's future has nobody waiting; the call's end writes that row again


def storable(value: Any) -> Any:
    """JSON as jsonb takes it: NUL characters, which Postgres has no room for, become U+2400."""
    if isinstance(value, str):
        return value.replace("\x00", "\u2400") if "\x00" in value else value
    if isinstance(value, dict):
        return {storable(k): storable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [storable(v) for v in value]
    return value
