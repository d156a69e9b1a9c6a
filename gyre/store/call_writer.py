"""Writes of calls: whatever is written together is one transaction, and one round trip to Postgres.

The gateway writes twice a call, so this is psycopg itself and libpq's pipeline: about a third of the CPU time, and a
fifth of the round trips, of a session of SQLAlchemy with a pool that is asked first whether its connection lives.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb
from sqlalchemy.dialects.postgresql import JSONB

from gyre.store.db import libpq_url
from gyre.store.gateway_queries import CallWrite
from gyre.store.models import Call, Node

_JSON = {c.name for model in (Call, Node) for c in model.__table__.columns if isinstance(c.type, JSONB)}
_SPLIT = "SELECT gyre_split_node(%(node_id)s, %(new_id)s, %(at)s, %(start)s, %(length)s)"
_KIND = "UPDATE calls SET kind = %(kind)s WHERE id = %(id)s"


class CallWriter:
    """Writes on a connection of its own, made when it is needed; one write at a time."""

    def __init__(self, url: str) -> None:
        self._url = libpq_url(url)
        self._connection: psycopg.AsyncConnection[tuple[Any, ...]] | None = None

    async def write(self, writes: Sequence[CallWrite]) -> None:
        """Commit the writes together, or none of them.

        Writing the same again changes nothing: the commit's answer may have been lost with the connection.
        Raises psycopg.OperationalError where Postgres is away, other psycopg.Error for rows that it refuses: a node
        that is split but is not there, is no prompt, is not longer than `at` or was cut meanwhile is a DataError. After
        any error the next write makes a new connection.
        """
        connection = self._connection
        if connection is None:
            connection = self._connection = await psycopg.AsyncConnection.connect(self._url, autocommit=True)
        try:
            async with connection.pipeline(), connection.cursor() as cursor:
                await cursor.execute("BEGIN")
                for query, row in _statements(writes):
                    await cursor.execute(query, row)
                await cursor.execute("COMMIT")
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Leave Postgres."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


def _statements(writes: Sequence[CallWrite]) -> Iterable[tuple[Any, dict[str, Any]]]:
    """In an order that satisfies the foreign keys: calls, then their nodes, then the leaves that calls name."""
    for begin in {w.call_id: w.begin for w in writes if w.begin is not None}.values():
        yield _insert("calls", tuple(begin)), _stored(begin)
    for write in writes:
        for split in write.splits:
            yield _SPLIT, dataclasses.asdict(split)
        for node in write.nodes:
            yield _insert("nodes", tuple(node)), _stored(node)
    for write in writes:
        if write.end is not None:
            yield _update_call(tuple(write.end)), {**_stored(write.end), "the_call": write.call_id}
        for call_id, kind in write.kinds.items():
            yield _KIND, {"id": call_id, "kind": kind}


def _stored(row: dict[str, Any]) -> dict[str, Any]:
    # None is SQL's NULL, not JSON's.
    return {k: Jsonb(v) if k in _JSON and v is not None else v for k, v in row.items()}


@functools.cache
def _insert(table: str, columns: tuple[str, ...]) -> bytes:
    query = sql.SQL("INSERT INTO {} ({}) VALUES ({}) ON CONFLICT (id) DO NOTHING").format(
        sql.Identifier(table),
        sql.SQL(", ").join(map(sql.Identifier, columns)),
        sql.SQL(", ").join(map(sql.Placeholder, columns)),
    )
    return query.as_bytes()  # else each execution would compose it again


@functools.cache
def _update_call(columns: tuple[str, ...]) -> bytes:
    change = [sql.SQL("{} = {}").format(sql.Identifier(c), sql.Placeholder(c)) for c in columns]
    return sql.SQL("UPDATE calls SET {} WHERE id = %(the_call)s").format(sql.SQL(", ").join(change)).as_bytes()
