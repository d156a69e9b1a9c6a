"""The gateway's own queries, asynchronous: rollouts by token, cells, a rollout's tree, and batched writes of calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.errors import OperationalError
from sqlalchemy import BigInteger, BindParameter, Executable, Integer, Text, any_, bindparam, func, select, text, update
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gyre.store.db import libpq_url
from gyre.store.models import Call, Cell, Node, Rollout

CELLS_CHANNEL = "gyre_cells"


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """What the gateway needs to know of a rollout."""

    id: str
    run_id: str
    state: str
    min_version: int
    temperature: float


@dataclass(frozen=True, slots=True)
class CellRow:
    """A cell as the table `cells` has it."""

    name: str
    engine_url: str | None
    routable: bool
    serving_version: int | None
    max_running: int
    engine_incarnation: str | None


@dataclass(frozen=True, slots=True)
class NodeSplit:
    """Cut prompt node `node_id` after its first `at` tokens, so that another prompt can share them.

    The first `at` tokens become node `new_id`, with the old parent, start, rollout and call. The old node keeps its id
    (its children and its calls need no change) and the rest, below `new_id`.
    """

    node_id: int
    new_id: int
    at: int


@dataclass(slots=True)
class CallWrite:
    """A call's row as it begins and, with `end` and `nodes`, as it ends; what is written is written at once.

    `begin` and `nodes` hold whole rows (column -> value); `end` the columns that change when the call ends. `splits`
    are done, in order, before this write's `nodes` and after those of the writes before it.
    """

    call_id: int
    begin: dict[str, Any] | None = None
    nodes: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    splits: list[NodeSplit] = field(default_factory=list)


END_COLUMNS = (
    "status",
    "leaf_id",
    "response",
    "finish_reason",
    "cached_tokens",
    "completion_tokens",
    "cells",
    "routed_at",
    "first_token_at",
    "ended_at",
)
_BEGIN = pg_insert(Call).on_conflict_do_nothing(index_elements=[Call.id])
NODE_COLUMNS = (
    "id", "rollout_id", "parent_id", "call_id", "kind", "start", "length", "token_ids", "logprobs", "version_spans",
)  # fmt: skip
_JSON = JSONB(none_as_null=True)  # None is SQL's NULL, not JSON's


def _parameter(table: Any, column: str, prefix: str = "") -> BindParameter[Any]:
    kind = table.c[column].type
    return bindparam(f"{prefix}{column}", type_=_JSON if isinstance(kind, JSONB) else kind)


_NODES = (
    pg_insert(Node)
    .values({name: _parameter(Node.__table__, name) for name in NODE_COLUMNS})
    .on_conflict_do_nothing(index_elements=[Node.id])
)
_END = (
    update(Call)
    .where(Call.id == bindparam("the_call"))
    .values({name: _parameter(Call.__table__, name, "new_") for name in END_COLUMNS})
)
# One statement, so that a split is whole. Where `new_id` is there already, nothing is inserted and nothing updated.
_SPLIT = text("""
    WITH head AS (
        INSERT INTO nodes (id, rollout_id, parent_id, call_id, kind, start, length, token_ids)
        SELECT :new_id, rollout_id, parent_id, call_id, kind, start, :at, substr(token_ids, 1, 4 * :at)
          FROM nodes WHERE id = :node_id AND kind = 'prompt' AND length > :at AND :at > 0
        ON CONFLICT (id) DO NOTHING RETURNING id)
    UPDATE nodes SET parent_id = head.id, start = start + :at, length = length - :at,
                     token_ids = substr(token_ids, 4 * :at + 1)
      FROM head WHERE nodes.id = :node_id
""").bindparams(*(bindparam(name, type_=kind) for name, kind in
                  (("new_id", BigInteger), ("node_id", BigInteger), ("at", Integer))))  # fmt: skip
_SPLIT_MISSING = text("SELECT * FROM unnest(:ids) AS id WHERE id NOT IN (SELECT id FROM nodes WHERE id = ANY (:ids))")


_FACTS = select(Rollout.token, Rollout.id, Rollout.run_id, Rollout.state, Rollout.min_version, Rollout.temperature)


async def rollouts_by_token(engine: AsyncEngine, tokens: Sequence[str]) -> dict[str, RolloutFacts]:
    """The rollouts with these tokens, by token."""
    async with engine.connect() as connection:
        rows = await connection.execute(
            _FACTS.where(Rollout.token == any_(bindparam("tokens", type_=ARRAY(Text)))), {"tokens": tokens}
        )
        return {
            row.token: RolloutFacts(row.id, row.run_id, row.state, row.min_version, row.temperature) for row in rows
        }


async def cells_of_run(engine: AsyncEngine, run_id: str) -> list[CellRow]:
    """The run's cells."""
    query = select(
        Cell.name, Cell.engine_url, Cell.routable, Cell.serving_version, Cell.max_running, Cell.engine_incarnation
    ).where(Cell.run_id == run_id)
    async with engine.connect() as connection:
        return [CellRow(*row) for row in await connection.execute(query)]


async def cell_notices(url: str, run_id: str, poll_s: float) -> AsyncIterator[None]:
    """One item at once, one a NOTIFY of `gyre_cells` for the run, and one every `poll_s` seconds at the latest.

    Raises psycopg.OperationalError when the connection is lost.
    """
    connection = await psycopg.AsyncConnection.connect(libpq_url(url), autocommit=True)
    async with connection:
        await connection.execute(f"LISTEN {CELLS_CHANNEL}")
        yield
        while True:
            if connection.closed:
                raise OperationalError("the LISTEN connection is closed")
            relevant = False
            notices = 0
            async for notice in connection.notifies(timeout=poll_s, stop_after=1):
                notices += 1
                relevant = relevant or notice.payload in ("", run_id)
            if relevant or not notices:
                yield


async def reserve_ids(engine: AsyncEngine, table: str, count: int) -> list[int]:
    """`count` fresh ids of `table`'s sequence, so that rows can be written together without asking for theirs.

    Committed: a sequence that is not would be behind after a crash of Postgres, and give the same ids again.
    """
    query = text("SELECT nextval(pg_get_serial_sequence(:table, 'id')) FROM generate_series(1, :count)")
    async with engine.begin() as connection:
        return [int(row[0]) for row in await connection.execute(query, {"table": table, "count": count})]


async def write_calls(connection: AsyncConnection, writes: Sequence[CallWrite]) -> None:
    """Store the writes within the connection's transaction. Order of statements satisfies the foreign keys.

    Writing the same again changes nothing: the commit's answer may have been lost with the connection.
    Raises ValueError for a split of a node that is not there, is not a prompt, or is not longer than `at`.
    """
    if begins := {w.call_id: w.begin for w in writes if w.begin is not None}:
        await _each(connection, _BEGIN, list(begins.values()))
    nodes: list[dict[str, Any]] = []
    for write in writes:
        if write.splits:
            await _each(connection, _NODES, nodes)  # what is split may be among them
            nodes = []
            await _split(connection, write.splits)
        nodes += write.nodes
    await _each(connection, _NODES, nodes)
    if ends := [
        {"the_call": w.call_id, **{f"new_{name}": w.end.get(name) for name in END_COLUMNS}}
        for w in writes
        if w.end is not None
    ]:
        await _each(connection, _END, ends)


async def _split(connection: AsyncConnection, splits: Sequence[NodeSplit]) -> None:
    await _each(connection, _SPLIT, [{"node_id": s.node_id, "new_id": s.new_id, "at": s.at} for s in splits])
    if missing := set(await connection.scalars(_SPLIT_MISSING, {"ids": [s.new_id for s in splits]})):
        bad = next(s for s in splits if s.new_id in missing)
        raise ValueError(
            f"node {bad.node_id} cannot be split at {bad.at}: it must be a prompt with more tokens than that"
        )


async def _each(connection: AsyncConnection, statement: Executable, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    # The driver takes a list, even of one row, by its slower way for many.
    await connection.execute(statement, rows if len(rows) > 1 else rows[0])


async def load_tree(engine: AsyncEngine, rollout_id: str) -> tuple[Sequence[Any], Sequence[Any], int]:
    """The rollout's complete calls (all columns, oldest first), its nodes' ids, and the highest seq that any call has.

    Calls that a dead gateway left running are marked incomplete first: nobody waits for them any more.
    """
    dead = (
        update(Call)
        .where(Call.rollout_id == rollout_id, Call.status == "running")
        .values(status="incomplete", ended_at=func.now())
    )
    columns = [c for c in Call.__table__.columns if c.name not in ("rollout_id",)]
    complete = select(*columns).where(Call.rollout_id == rollout_id, Call.status == "complete").order_by(Call.seq)
    spans = select(Node.id, Node.parent_id, Node.start, Node.token_ids).where(Node.rollout_id == rollout_id)
    async with engine.begin() as connection:
        await connection.execute(dead)
        calls = (await connection.execute(complete)).all()
        nodes = (await connection.execute(spans.order_by(Node.start, Node.id))).all()
        top = await connection.scalar(select(func.max(Call.seq)).where(Call.rollout_id == rollout_id))
    return calls, nodes, -1 if top is None else int(top)
