"""Deaths while a gradient is on its way between machines: the batch ends with the gradient of a step in peace.

Central is here; a satellite without an engine works in a network namespace, and reaches central's trainer by TCP alone.
`make faults` takes every point; the usual tests take those marked with a star.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

import activities.cell_site
import activities.cell_store
from gyre.store import queries as q
from gyre.store.db import make_engine, transaction
from gyre.store.migrate import upgrade
from gyre.store.server import PostgresServer
from tests.cells import deadly
from tests.cells.agent import CENTRAL, SATELLITE
from tests.cells.machines import Machines
from tests.cells.pair import Pair
from tests.cells.satellite import BEAT_S
from tests.cells.zygote import NETNS, Forked, Zygote
from tests.settings import worker_settings
from tests.training.conftest import write_tiny_policy
from tests.training.world import World, run_config
from workers.settings import WorkerSettings
from workflows import messages as m

pytestmark = pytest.mark.asyncio(loop_scope="module")

EVERY = bool(os.environ.get("GYRE_EVERY_FAULT"))
KILLS = [
    ("pull of the push begins", ""),
    ("pull of the push done", ""),
    ("absorb written, not committed", ""),
    ("absorb committed", "*"),
    ("absorb done", ""),
]
# the point at which central finds its satellite gone; whether that machine comes back; who computed what counts
LOSSES = [
    ("pull of the push begins", True, SATELLITE, ""),
    ("pull of the push done", True, SATELLITE, ""),
    ("absorb written, not committed", True, SATELLITE, ""),
    ("absorb committed", False, SATELLITE, ""),
    ("pull of the push begins", False, CENTRAL, "*"),
]


@dataclass
class Apart:
    """Central's agent is in this process, its trainer on this machine; the satellite is all of the other machine."""

    pair: Pair
    machines: Machines
    settings: WorkerSettings
    """Of the satellite."""
    zygote: Zygote
    """What all of the other machine is forked from."""
    log: Path
    agent: Forked | None = None

    async def begin(self) -> None:
        """The machine is there, and its satellite works, as it does from then on."""
        self.machines.heal()
        if self.agent is not None:
            return
        before = self.epoch
        argv = [sys.executable, "-m", "tests.cells.satellite", str(self.zygote.socket)]
        env = {**os.environ, **self.settings.to_env(), NETNS: self.machines.name}
        with self.log.open("ab") as output:
            self.agent = self.zygote.Popen(argv, env=env, stdout=output)
        await self.pair.until(lambda: self.epoch > before and self.trains, "the satellite is there", 300)

    @property
    def epoch(self) -> int:
        with transaction(self.pair.db) as session:
            return q.cell_epoch(session, self.pair.run.run_id, SATELLITE)

    @property
    def trains(self) -> bool:
        with transaction(self.pair.db) as session:
            rows = {cell.name: cell for cell in q.cells(session, self.pair.run.run_id)}
            return SATELLITE in rows and rows[SATELLITE].trainer_incarnation is not None

    def lose(self) -> None:
        """The machine is gone, all at once: nobody hears that its connections end."""
        self.machines.cut()
        self.end()

    def end(self) -> None:
        for pid in self.machines.processes():
            os.kill(pid, signal.SIGKILL)
        if self.agent is not None:
            self.agent.wait()
            self.agent = None

    async def finish(self, doing: asyncio.Task[m.FinishedStep]) -> m.FinishedStep:
        try:
            return await doing
        except TimeoutError as error:
            raise AssertionError(f"the step does not end; the satellite: {self.log.read_text()[-3000:]}") from error


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def apart(
    machines: Machines, zygote: Zygote, hurried: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Apart]:
    here, there = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there")
    async with contextlib.AsyncExitStack() as ends:
        patch = ends.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(activities.cell_site, "BEAT_S", BEAT_S)
        patch.setattr(activities.cell_store, "LOST_AFTER_S", 10 * BEAT_S)
        database = ends.enter_context(PostgresServer(here / "postgres", listen=machines.here)).url
        upgrade(database)
        db = make_engine(database)
        ends.callback(db.dispose)
        world = World(run_config(write_tiny_policy(tmp_path_factory.mktemp("policy"))), db)
        world.open_run()
        pair = Pair(world, database, here, cells=[CENTRAL], host=machines.here)
        await pair.start()
        ends.push_async_callback(pair.stop)
        settings = worker_settings(pair.run, database, there, host=machines.there)
        apart = Apart(pair, machines, settings, zygote, there / "agent.log")
        ends.callback(apart.end)
        yield apart


@pytest.mark.parametrize("point", [point for point, star in KILLS if star or EVERY])
async def test_central_killed_while_it_takes_a_push_over_the_network(apart: Apart, point: str) -> None:
    pair, central = apart.pair, apart.pair.agents[CENTRAL].site
    before = central.trainer.endpoint
    assert before is not None and before.address.startswith(f"{apart.machines.here}:")
    await apart.begin()
    given = deadly.order(pair.sockets, CENTRAL, point)
    step = pair.next_step()
    done = await apart.finish(asyncio.create_task(pair.finish(step)))
    assert done.version == step.index + 1 and not given.exists()
    pair.check(step)
    assert {row.computed_by for row in pair.rows(step)} == {SATELLITE}
    assert central.trainer.endpoint not in (before, None), "it pushed to the trainer that came after"


@pytest.mark.parametrize(
    ("point", "returns", "counts"), [(point, returns, who) for point, returns, who, star in LOSSES if star or EVERY]
)
async def test_a_machine_lost_in_the_midst_of_its_push(apart: Apart, point: str, returns: bool, counts: str) -> None:
    pair, central = apart.pair, apart.pair.agents[CENTRAL]
    await apart.begin()
    given = deadly.order(pair.sockets, CENTRAL, point, number=signal.SIGSTOP)
    step = pair.next_step()
    finishing = asyncio.create_task(pair.finish(step))
    assert central.site.trainer.pid is not None
    absorbs = psutil.Process(central.site.trainer.pid)
    await pair.until(lambda: not given.exists() and absorbs.status() == psutil.STATUS_STOPPED, f"central at {point!r}")
    apart.lose()
    absorbs.resume()
    async with contextlib.AsyncExitStack() as work:
        if returns:
            await apart.begin()
        else:
            await work.enter_async_context(central.working())
        done = await apart.finish(finishing)
    assert done.version == step.index + 1
    pair.check(step)
    assert {row.computed_by for row in pair.rows(step)} == {counts}
