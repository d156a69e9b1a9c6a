"""The store with a rollout of 1M tokens in 1,000 calls: time to insert, time to read a branch, bytes on disk.

Inserted the gateway's slowest way: calls one after the other, each with two commits that reach the disk, so that
nothing is batched and the server waits for fsync 2,000 times.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import psycopg
import uvloop
from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, text

from gyre.store import queries
from gyre.store.call_writer import CallWriter
from gyre.store.db import libpq_url, make_async_engine, make_engine, transaction
from gyre.store.gateway_queries import load_tree
from gyre.store.migrate import upgrade
from gyre.store.models import MicroBatch, Sample
from gyre.store.server import PostgresServer
from tests.store.long_rollout import LongRollout
from tests.store.world import make_world

CALLS, TOKENS = 1_000, 1_000_000
TABLES = ("nodes", "calls")


async def insert(url: str, rollout: LongRollout) -> tuple[float, float]:
    """Seconds of writing, and CPU seconds of them in this process; without those of making the rows."""
    writer = CallWriter(url)
    wall = cpu = 0.0
    for begin, end in rollout.writes():
        began, used = time.perf_counter(), time.process_time()
        await writer.write([begin])
        await writer.write([end])
        wall, cpu = wall + time.perf_counter() - began, cpu + time.process_time() - used
    await writer.close()
    return wall, cpu


def commits(url: str, count: int) -> float:
    """Seconds that as many commits of one small row take here and now: what disk and machine ask at least."""
    with psycopg.connect(libpq_url(url), autocommit=True) as c:
        c.execute("CREATE TABLE small (n int)")
        began = time.perf_counter()
        for i in range(count // 10):
            c.execute("INSERT INTO small VALUES (%s)", [i])
        return 10 * (time.perf_counter() - began)


async def reload(url: str, rollout_id: str) -> float:
    engine = make_async_engine(url)
    await load_tree(engine, rollout_id)
    began = time.perf_counter()
    await load_tree(engine, rollout_id)
    took = time.perf_counter() - began
    await engine.dispose()
    return took


def sample_of(engine: Engine, rollout: LongRollout, step_id: int) -> int:
    """A micro-batch of one sample, the longest branch with all of its answers as targets; returns its id."""
    leaf, depth = rollout.deepest
    path = text("SELECT id, length FROM path_nodes(:leaf) WHERE kind = 'generated'")
    with transaction(engine) as s:
        owned = s.execute(path, {"leaf": leaf}).all()
        targets = sum(row.length for row in owned)
        batch = MicroBatch(step_id=step_id, n_tokens=depth, n_targets=targets)
        s.add(batch)
        s.flush()
        s.add(
            Sample(
                step_id=step_id, rollout_id=rollout.rollout_id, leaf_id=leaf, kind="main", rank=0, n_tokens=depth,
                n_targets=targets, owned_nodes=[row.id for row in owned], rollout_targets=targets, advantage=1.0,
                micro_batch_id=batch.id,
            )
        )  # fmt: skip
        return batch.id


def read_sample(engine: Engine, micro_batch_id: int, rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        with transaction(engine) as s:
            queries.micro_batch_rows(s, micro_batch_id)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def read(connection: psycopg.Connection[tuple[object, ...]], query: str, rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        connection.execute(query).fetchall()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, PostgresServer(Path(folder) / "pg") as server:
        upgrade(server.url)
        engine = make_engine(server.url)
        with transaction(engine) as s:
            world = make_world(s)
        rollout_id = world.rollouts[0][0]
        rollout = LongRollout(rollout_id, CALLS, TOKENS)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:  # as the gateway has it
            inserted, cpu = loop.run(insert(server.url, rollout))
            reloaded = loop.run(reload(server.url, rollout_id))
        least = commits(server.url, 2 * CALLS)
        leaf, depth = rollout.deepest
        with psycopg.connect(libpq_url(server.url), autocommit=True) as c:
            c.execute("VACUUM ANALYZE")
            spans = f"SELECT id, kind, start, token_ids, logprobs, version_spans FROM path_nodes({leaf})"
            branch = read(c, spans)
            sizes = {t: c.execute(f"SELECT pg_total_relation_size('{t}')").fetchone() for t in TABLES}
        trained = read_sample(engine, sample_of(engine, rollout, world.step_id))
        engine.dispose()
        disk = sum(int(row[0]) for row in sizes.values() if row)
    bound = rollout.distinct * 8 + rollout.text_bytes
    table = Table("what", "measured", "goal", title=f"a rollout of {rollout.distinct:,} tokens in {CALLS:,} calls")
    table.add_row("insert, all calls, two commits each", f"{inserted:.2f} s", "< 5 s")
    table.add_row("… as many commits of one small row, now", f"{least:.2f} s", "")
    table.add_row("… CPU time of the writer alone", f"{cpu:.2f} s", "")
    table.add_row(f"read the longest branch ({depth:,} tokens), bytes", f"{1000 * branch:.0f} ms", "< 100 ms")
    table.add_row("read it as the trainer does", f"{1000 * trained:.0f} ms", "< 100 ms")
    table.add_row("load the whole tree, as a restarted gateway does", f"{1000 * reloaded:.0f} ms", "")
    table.add_row("on disk (nodes and calls with indices)", f"{disk / 1e6:.1f} MB", f"< {2 * bound / 1e6:.1f} MB")
    table.add_row("… over distinct tokens x 8 bytes + text", f"{disk / bound:.2f}x", "< 2x")
    Console().print(table)


if __name__ == "__main__":
    main()
