"""The gateway's own queries, asynchronous: rollouts by token, cells, a rollout's tree, and batched writes of calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.errors import OperationalError
from sqlalchemy import Text, any_, bindparam, func, select, text, update
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncEngine

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
    kv_tokens: int | None = None
    """Tokens of its KV cache; None: not known, so that only `max_running` bounds what it is given."""
    admits: bool = True
    """Whether it takes new calls; one that does not keeps those that it has."""


@dataclass(frozen=True, slots=True)
class NodeSplit:
    """Cut prompt node `node_id` after its first `at` tokens, so that another prompt can share them.

    The first `at` tokens become node `new_id`, with the old parent, start, rollout and call. The old node keeps its id
    (its children and its calls need no change) and the rest, below `new_id`. `start` and `length` are the old node's
    before the cut: where they are others by now, another write has cut it, and this one is refused.
    """

    node_id: int
    new_id: int
    at: int
    start: int
    length: int


@dataclass(slots=True)
class CallWrite:
    """A call's row as it begins and, with `end` and `nodes`, as it ends; what is written is written at once.

    `begin` and `nodes` hold whole rows (column -> value); `end` the columns that change when the call ends. `splits`
    are done, in order, before this write's `nodes` and after those of the writes before it. `kinds` (call id -> kind)
    is what earlier calls turned out to be.
    """

    call_id: int
    begin: dict[str, Any] | None = None
    nodes: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    splits: list[NodeSplit] = field(default_factory=list)
    kinds: dict[int, str] = field(default_factory=dict)


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
        Cell.name,
        Cell.engine_url,
        Cell.routable,
        Cell.serving_version,
        Cell.max_running,
        Cell.engine_incarnation,
        Cell.kv_tokens,
        Cell.admits,
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


async def load_tree(
    engine: AsyncEngine, rollout_id: str, running: Collection[int] = ()
) -> tuple[Sequence[Any], Sequence[Any], int, dict[int, str]]:
    """The rollout's complete calls (all columns, oldest first), its nodes (parents first), its highest seq, and the
    kinds of those calls that run.

    `running` are the ids of calls that do; others that a dead gateway left running are marked incomplete first: nobody
    waits for them any more.
    """
    dead = (
        update(Call)
        .where(Call.rollout_id == rollout_id, Call.status == "running", Call.id.not_in(running))
        .values(status="incomplete", ended_at=func.now())
    )
    columns = [c for c in Call.__table__.columns if c.name not in ("rollout_id",)]
    complete = select(*columns).where(Call.rollout_id == rollout_id, Call.status == "complete").order_by(Call.seq)
    spans = select(Node.id, Node.parent_id, Node.start, Node.token_ids, Node.kind).where(Node.rollout_id == rollout_id)
    async with engine.begin() as connection:
        top = await connection.scalar(select(func.max(Call.seq)).where(Call.rollout_id == rollout_id))
        if top is None:  # its first call: every rollout has one, and nothing is there yet
            return [], [], -1, {}
        await connection.execute(dead)
        calls = (await connection.execute(complete)).all()
        nodes = (await connection.execute(spans.order_by(Node.start, Node.id))).all()
        alive = (await connection.execute(select(Call.id, Call.kind).where(Call.id.in_(running)))).all()
    top = max([top, *(call.seq for call in calls)])  # what was on its way as the first query ran may have come since
    return calls, nodes, top, {row.id: row.kind for row in alive}
