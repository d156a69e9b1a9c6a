"""The gap between two micro-batches of a training cell: with the next one made ready meanwhile, and without.

A real agent's training loop, a real trainer process (the quickstart's policy) and a real Postgres; no engine runs.
Steps alternate between the two ways. The gap is the time from the end of a computation, as the ledger has it, to the
end of the next one, less the seconds that the trainer computed: claim, rows out of Postgres, packing, commits, talk.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path

from sqlalchemy import Engine, text

from activities.cell_site import CellSite
from activities.cell_work import Work
from benchmarks.table import show
from gyre.store import queries as q
from gyre.store.db import make_engine, transaction
from gyre.store.migrate import upgrade
from gyre.store.server import PostgresServer
from tests.settings import worker_settings
from tests.training.world import World, run_config

POLICY = Path(__file__).parents[1] / "examples" / "quickstart" / "policy"
ROLLOUTS, BRANCHES, ROUNDS = 160, 16, 3
"""Rollouts of a step (two branches each), branches of a micro-batch (some 360 tokens), steps of each way."""
WAYS = {"next one made ready meanwhile": True, "one after the other": False}

_GAPS = text("""
    SELECT EXTRACT(epoch FROM computed_at - lag(computed_at) OVER (ORDER BY computed_at))::float8 * 1000
           - (metrics ->> 'seconds')::float8 * 1000 AS gap
      FROM micro_batches WHERE step_id = :step ORDER BY computed_at OFFSET 1
""")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        data = Path(folder)
        with PostgresServer(data / "postgres") as server:
            upgrade(server.url)
            found = asyncio.run(measure(server.url, data))
    show("Gap between two micro-batches", "ms", found, next(iter(WAYS)), more_is_better=False)


async def measure(url: str, data: Path) -> dict[str, list[float]]:
    run = run_config(POLICY)
    engine = make_engine(url)
    world = World(run, engine)
    settings = worker_settings(run, url, data)
    world.open_run()
    site = CellSite(run, "alpha", engine, logs=settings.logs, sockets=settings.sockets, env=settings.to_env())
    await site.take()
    await site.set_role("train")
    keeping = asyncio.create_task(site.trainer.keep(site.report))
    gaps: dict[str, list[float]] = {name: [] for name in WAYS}
    try:
        async with asyncio.timeout(300):
            await site.trainer.ready.wait()
        await step(site, world, engine, 0, looks_ahead=True)  # the first computations of a process are slow
        for index in range(1, 1 + 2 * ROUNDS):
            name = list(WAYS)[index % 2]
            gaps[name] += await step(site, world, engine, index, looks_ahead=WAYS[name])
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        await asyncio.to_thread(site.trainer.stop)
        engine.dispose()
    return gaps


async def step(site: CellSite, world: World, engine: Engine, index: int, *, looks_ahead: bool) -> list[float]:
    """Train a step; its gaps in milliseconds."""
    step_id = world.step(index, rollouts=ROLLOUTS, per_batch=BRANCHES)
    work = Work(site, looks_ahead=looks_ahead)
    running = asyncio.create_task(work.run())
    try:
        async with asyncio.timeout(300):
            while not (progress := await site.store.look(lambda s: q.step_progress(s, step_id))).complete_at(
                str(site.trainer.incarnation)
            ):
                if running.done():
                    break
                await asyncio.sleep(0.2)
    finally:
        work.stop.set()
        await running
    assert progress.queued == progress.claimed == 0
    with transaction(engine) as s:
        gaps = list(s.scalars(_GAPS, {"step": step_id}))
    await site.trainer.client.optimizer_step(step_id)
    return gaps


if __name__ == "__main__":
    main()
