"""The writer outlives whatever a write runs into."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import sqlalchemy.exc
from sqlalchemy.ext.asyncio import AsyncEngine

from gyre.gateway import recorder as module
from gyre.gateway.errors import GatewayError
from gyre.gateway.metrics import Metrics
from gyre.gateway.recorder import Recorder
from gyre.store.gateway_queries import CallWrite


class Pool:
    """Stands for the engine: each `begin` raises the next of its errors, then gives an empty transaction."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        if self.errors:
            raise self.errors.pop(0)
        yield None


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ids of the calls that were written; call 13 is a bad row, call 14 breaks in a way that nobody thought of."""
    ids: list[int] = []

    async def write(_: Any, writes: list[CallWrite]) -> None:
        if any(w.call_id == 13 for w in writes):
            raise sqlalchemy.exc.StatementError("a value that has no place in its column", None, None, ValueError())
        if any(w.call_id == 14 for w in writes):
            raise RuntimeError
        ids.extend(w.call_id for w in writes)

    monkeypatch.setattr(module, "write_calls", write)
    return ids


def recorder(*errors: Exception) -> Recorder:
    return Recorder(cast(AsyncEngine, Pool(*errors)), Metrics(), 5.0)


@pytest.mark.parametrize(
    "error",
    [
        sqlalchemy.exc.TimeoutError("QueuePool limit of size 4 overflow 0 reached, connection timed out"),
        sqlalchemy.exc.OperationalError("SELECT", None, Exception()),
        ConnectionResetError(),  # without a text
        TimeoutError(),
    ],
)
async def test_a_database_that_is_away_only_takes_time(written: list[int], error: Exception) -> None:
    writer = recorder(error)
    writer.start()
    await asyncio.wait_for(writer.write(CallWrite(1)), 3)
    assert written == [1]
    tries = [error]

    async def read() -> str:
        if tries:
            raise tries.pop()
        return "read"

    assert await asyncio.wait_for(writer.retried(read), 3) == "read"
    await writer.stop()


@pytest.mark.parametrize("bad", [13, 14])
async def test_one_bad_row_fails_alone_and_the_writer_goes_on(written: list[int], bad: int) -> None:
    writer = recorder()
    posted = [writer.post(CallWrite(n)) for n in (1, bad, 2)]
    writer.start()
    done, _ = await asyncio.wait(posted, timeout=3)
    assert len(done) == 3
    assert isinstance(posted[1].exception(), GatewayError)
    await asyncio.wait_for(writer.write(CallWrite(3)), 3)
    assert written == [1, 2, 3]
    await writer.stop()


async def test_a_beginning_waits_for_company_and_an_end_does_not(written: list[int]) -> None:
    writer = recorder()
    writer.start()
    began = writer.post(CallWrite(1))
    await asyncio.sleep(module.COMPANY_S / 4)
    assert not began.done()
    await writer.write(CallWrite(2, end={}))
    assert began.done() and written == [1, 2]
    await asyncio.wait_for(writer.post(CallWrite(3)), module.COMPANY_S * 10)  # nobody came
    await writer.stop()
