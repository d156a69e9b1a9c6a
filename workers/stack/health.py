"""Is a process ready? Each check asks the real thing and answers None when it is, else what it still waits for."""

from __future__ import annotations

import datetime as dt
from collections.abc import Awaitable, Callable

import httpx
import psycopg

Check = Callable[[float], Awaitable[str | None]]
"""Argument: Unix time at which the process was started, so that an answer from the one before does not count."""


async def alive(_since: float) -> str | None:
    """For processes without a better sign: that it runs is enough."""
    return None


def _client() -> httpx.AsyncClient:
    # Checks talk to this machine alone; loading certificates would cost more than all the rest of a check.
    return httpx.AsyncClient(timeout=2.0, verify=False, trust_env=False)


def http_ok(url: str) -> Check:
    """A GET of `url` answers 200."""

    async def check(_since: float) -> str | None:
        try:
            async with _client() as client:
                answer = await client.get(url)
        except httpx.HTTPError:
            return f"waits for {url}"
        return None if answer.status_code == 200 else f"{url} answers {answer.status_code}"

    return check


def postgres_answers(libpq_url: str) -> Check:
    """A connection to the server's own database `postgres` can be made."""
    admin = libpq_url.rpartition("/")[0] + "/postgres"

    async def check(_since: float) -> str | None:
        try:
            connection = await psycopg.AsyncConnection.connect(admin, connect_timeout=2)
        except psycopg.OperationalError as error:
            return f"no connection yet: {str(error).splitlines()[-1].strip()}"
        await connection.close()
        return None

    return check


def polls_queue(http_address: str, namespace: str, queue: str) -> Check:
    """A Temporal worker has polled `queue` since the process was started. `http_address`: Temporal's, `host:port`."""
    url = f"http://{http_address}/api/v1/namespaces/{namespace}/task-queues/{queue}"

    async def check(since: float) -> str | None:
        try:
            async with _client() as client:
                # A worker may poll a queue for activities only, so both kinds count.
                for kind in ("TASK_QUEUE_TYPE_WORKFLOW", "TASK_QUEUE_TYPE_ACTIVITY"):
                    answer = await client.get(url, params={"taskQueueType": kind})
                    pollers = answer.json().get("pollers", []) if answer.status_code == 200 else []
                    if any(_unix(poller["lastAccessTime"]) >= since for poller in pollers):
                        return None
        except httpx.HTTPError:
            return "waits for Temporal"
        return f"waits until it polls {queue}"

    return check


def cell_is_up(libpq_url: str, run_id: str, cell: str) -> Check:
    """The cell's agent has reported a living engine and trainer since it was started."""

    async def check(since: float) -> str | None:
        try:
            async with await psycopg.AsyncConnection.connect(libpq_url, connect_timeout=2) as connection:
                cursor = await connection.execute(
                    "SELECT role, engine_incarnation IS NOT NULL, trainer_incarnation IS NOT NULL FROM cells"
                    " WHERE run_id = %s AND name = %s AND updated_at >= to_timestamp(%s)",
                    (run_id, cell, since),
                )
                row = await cursor.fetchone()
        except psycopg.OperationalError:
            return "waits for postgres"
        if row is None:
            return "agent starts"
        role, engine, trainer = row
        missing = [name for name, there in (("engine", engine), ("trainer", trainer)) if not there]
        if missing or role == "down":
            return (
                f"{' and '.join(missing) or 'engine and trainer'} of the cell start{'s' if len(missing) == 1 else ''}"
            )
        return None

    return check


def all_of(*checks: Check) -> Check:
    """Every check passes, asked in order."""

    async def check(since: float) -> str | None:
        for each in checks:
            if (waiting := await each(since)) is not None:
                return waiting
        return None

    return check


def _unix(timestamp: str) -> float:
    # Temporal prints nanoseconds, which fromisoformat does not take.
    seconds, _, fraction = timestamp.removesuffix("Z").partition(".")
    whole = dt.datetime.fromisoformat(seconds).replace(tzinfo=dt.UTC).timestamp()
    return whole + float(f"0.{fraction or 0}")
