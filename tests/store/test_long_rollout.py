"""A long rollout, at a tenth of the benchmark's size: what was written is what is read, and little more than that."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import numpy as np
import psycopg
import pytest
from sqlalchemy import Engine, text

from gyre.store import queries
from gyre.store.call_writer import CallWriter
from gyre.store.db import libpq_url, make_async_engine, transaction
from gyre.store.gateway_queries import CallWrite, load_tree
from gyre.store.tokens import unpack_ids
from tests.store.long_rollout import LongRollout
from tests.store.world import make_world


@pytest.fixture
def written(database: str, engine: Engine) -> tuple[LongRollout, list[CallWrite]]:
    """A rollout of 100 calls and 100,000 tokens, written in batches of nine calls."""
    with transaction(engine) as s:
        rollout = LongRollout(make_world(s).rollouts[0][0], calls=100, tokens=100_000)
    writes = [write for pair in rollout.writes() for write in pair]

    async def go() -> None:
        writer = CallWriter(database)
        for i in range(0, len(writes), 18):
            await writer.write(writes[i : i + 18])
        await writer.close()

    asyncio.run(go())
    return rollout, writes


def test_every_path_reads_back(database: str, engine: Engine, written: tuple[LongRollout, list[CallWrite]]) -> None:
    rollout, writes = written
    nodes = {n["id"]: n for w in writes for n in w.nodes}
    paths: dict[int | None, bytes] = defaultdict(bytes)
    for n in nodes.values():
        paths[n["id"]] = paths[n["parent_id"]] + n["token_ids"]
    leaf, depth = rollout.deepest
    with engine.connect() as c:
        leaves = c.execute(text("SELECT leaf_id FROM branch")).scalars().all()
        assert leaf in leaves and len(leaves) > 3
        for found in leaves:
            assert np.array_equal(c.scalar(text(f"SELECT path_tokens({found})")), unpack_ids(paths[found]))
        assert c.scalar(text("SELECT sum(length) FROM nodes")) == rollout.distinct
        assert len(unpack_ids(paths[leaf])) == depth
    with transaction(engine) as s:
        tree = queries.trees(s, [rollout.rollout_id])[rollout.rollout_id]
        assert {b.leaf_id for b in tree.branches()} == set(leaves)

    async def load() -> None:
        asynchronous = make_async_engine(database)
        calls, rows, top, _ = await load_tree(asynchronous, rollout.rollout_id)
        await asynchronous.dispose()
        assert top == 99 and [c.id for c in calls] == [w.call_id for w in writes[::2]]
        assert [c.response for c in calls] == [w.end["response"] for w in writes[1::2] if w.end]
        assert {r.id: r.token_ids for r in rows} == {i: n["token_ids"] for i, n in nodes.items()}

    asyncio.run(load())


def test_disk_is_within_twice_the_tokens_and_text(database: str, written: tuple[LongRollout, list[CallWrite]]) -> None:
    rollout, _ = written
    with psycopg.connect(libpq_url(database)) as c:
        row = c.execute("SELECT pg_total_relation_size('nodes') + pg_total_relation_size('calls')").fetchone()
    assert row is not None and row[0] < 2 * (rollout.distinct * 8 + rollout.text_bytes)


def test_bad_rows_change_nothing_and_the_writer_goes_on(
    database: str, engine: Engine, written: tuple[LongRollout, list[CallWrite]]
) -> None:
    _, writes = written
    begin, end = writes[0].begin, writes[1]
    assert begin is not None
    good = CallWrite(9000, begin | {"id": 9000, "seq": 100})
    broken = CallWrite(9000, None, [end.nodes[0] | {"id": 9001, "call_id": 9000, "length": 7}])

    async def go() -> None:
        writer = CallWriter(database)
        with pytest.raises(psycopg.errors.CheckViolation):
            await writer.write([good, broken])
        await writer.write(writes[-2:])
        await writer.close()

    asyncio.run(go())
    with engine.connect() as c:
        assert c.scalar(text("SELECT count(*) FROM calls")) == 100


async def test_a_writer_outlives_a_broken_connection(database: str, engine: Engine) -> None:
    with transaction(engine) as s:
        rollout = LongRollout(make_world(s).rollouts[0][0], calls=2, tokens=40)
    (first, first_end), (second, _) = rollout.writes()
    writer = CallWriter(database)
    await writer.write([first])
    with psycopg.connect(libpq_url(database), autocommit=True) as other:
        ended = "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE query = 'COMMIT'"
        assert set(other.execute(ended).fetchall()) == {(True,)}
    with pytest.raises(psycopg.OperationalError):
        await writer.write([first_end])
    await writer.write([first_end, second])
    await writer.close()
    with engine.connect() as c:
        assert c.execute(text("SELECT seq, status FROM calls ORDER BY seq")).all() == [(0, "complete"), (1, "running")]
