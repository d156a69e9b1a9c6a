"""The writer outlives whatever a write runs into."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import psycopg
import pytest
import sqlalchemy.exc

from gyre.gateway import recorder as module
from gyre.gateway.errors import GatewayError
from gyre.gateway.metrics import Metrics
from gyre.gateway.recorder import Recorder
from gyre.store.call_writer import CallWriter
from gyre.store.db import make_async_engine
from gyre.store.gateway_queries import CallWrite


@dataclass
class Postgres:
    """Stands for the database: each write raises the next of `errors`, then is remembered.

    Call 13 is a bad row, call 14 breaks in a way that nobody thought of.
    """

    errors: list[Exception] = field(default_factory=list)
    written: list[int] = field(default_factory=list)


@pytest.fixture
def postgres(monkeypatch: pytest.MonkeyPatch) -> Postgres:
    database = Postgres()

    async def write(_: CallWriter, writes: list[CallWrite]) -> None:
        if database.errors:
            raise database.errors.pop(0)
        if any(w.call_id == 13 for w in writes):
            raise psycopg.DataError("a value that has no place in its column")
        if any(w.call_id == 14 for w in writes):
            raise RuntimeError
        database.written.extend(w.call_id for w in writes)

    monkeypatch.setattr(CallWriter, "write", write)
    return database


def recorder() -> Recorder:
    return Recorder(make_async_engine("postgresql://nobody@127.0.0.1:9/nothing"), Metrics(), 5.0)


@pytest.mark.parametrize(
    "error",
    [
        sqlalchemy.exc.TimeoutError("QueuePool limit of size 4 overflow 0 reached, connection timed out"),
        sqlalchemy.exc.OperationalError("SELECT", None, Exception()),
        psycopg.OperationalError("server closed the connection unexpectedly"),
        psycopg.InterfaceError("the connection is closed"),
        ConnectionResetError(),  # without a text
        TimeoutError(),
    ],
)
async def test_a_database_that_is_away_only_takes_time(postgres: Postgres, error: Exception) -> None:
    postgres.errors.append(error)
    writer = recorder()
    writer.start()
    await asyncio.wait_for(writer.write(CallWrite(1)), 30)
    assert postgres.written == [1]
    tries = [error]

    async def read() -> str:
        if tries:
            raise tries.pop()
        return "read"

    assert await asyncio.wait_for(writer.retried(read), 30) == "read"
    await writer.stop()


@pytest.mark.parametrize("bad", [13, 14])
async def test_one_bad_row_fails_alone_and_the_writer_goes_on(postgres: Postgres, bad: int) -> None:
    writer = recorder()
    posted = [writer.post(CallWrite(n)) for n in (1, bad, 2)]
    writer.start()
    done, _ = await asyncio.wait(posted, timeout=30)
    assert len(done) == 3
    assert isinstance(posted[1].exception(), GatewayError)
    await asyncio.wait_for(writer.write(CallWrite(3)), 30)
    assert postgres.written == [1, 2, 3]
    await writer.stop()


async def test_a_beginning_waits_for_company_and_an_end_does_not(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = recorder()
    monkeypatch.setattr(module, "COMPANY_S", 600.0)
    writer.start()
    began = writer.post(CallWrite(1))
    await asyncio.sleep(0.05)
    assert not began.done()
    await asyncio.wait_for(writer.write(CallWrite(2, end={})), 30)
    assert began.done() and postgres.written == [1, 2]
    monkeypatch.setattr(module, "COMPANY_S", 0.05)
    await asyncio.wait_for(writer.post(CallWrite(3)), 30)  # nobody came
    await writer.stop()
