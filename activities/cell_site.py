"""A cell as its agent holds it: two processes, one role, one row."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from activities.cell_engine import CellEngine
from activities.cell_store import CellStore
from activities.cell_trainer import TRAINER_MODULE, CellTrainer, trainer_socket
from gyre.config import CellConfig, RunConfig
from gyre.ports import LOOPBACK, is_loopback
from gyre.serving.launch import EngineProcess
from gyre.serving.process import family, rss_mb, usable_cores
from gyre.store import queries as q
from gyre.store.queries import FencedError
from gyre.store.queries.cells import Role
from gyre.training.client import TrainerClient
from gyre.training.protocol import Endpoint, TrainerUnavailable

log = logging.getLogger("gyre.cell")

BEAT_S = 5.0
"""How often the row is written though nothing changed: its age says whether the agent lives (see LOST_AFTER_S)."""

GOODBYE_S = 10.0
"""How long an agent that ends may take to say so in its row."""


@dataclass(frozen=True)
class Programs:
    """What a cell's agent runs: the server, and the trainer's module (arguments as `workers.trainer` takes them)."""

    engine: type[EngineProcess] = EngineProcess
    trainer: str = TRAINER_MODULE


PROGRAMS = Programs()


class CellSite:
    """Engine, trainer and role of one cell. `logs` and `sockets` are folders; `env` is the trainer's environment.

    `host`: address of this machine by which the gateway and the other cells' machines reach them.
    """

    def __init__(
        self, run: RunConfig, cell: str, engine: Engine, *, logs: Path, sockets: Path, env: Mapping[str, str],
        programs: Programs = PROGRAMS, host: str = LOOPBACK,
    ) -> None:  # fmt: skip
        self.config = _on_this_machine(run, cell)
        self.run, self.name, self.central = run, cell, self.config.central
        self.store = CellStore(engine, run, cell)
        self.engine = CellEngine(self.store, self.config, logs / f"engine-{cell}.log", programs.engine, host=host)
        self.trainer = CellTrainer(self.config, sockets, logs / f"trainer-{cell}.log", env, programs.trainer, host=host)
        self._sockets, self._host = sockets, host
        self.role: Role = "rollout"
        """A cell begins by serving; its Cell workflow says what comes then."""
        self.taken = asyncio.Event()
        """Set once the cell is this agent's: before that, the fence would refuse whatever it does."""
        self.switching = asyncio.Lock()
        """Held by whoever changes the role or the served weights."""
        self._reporting = asyncio.Lock()

    async def take(self) -> None:
        """Become the cell's agent, and say so in its row."""
        epoch = await self.store.take(central=self.central, max_running=self.run.serving.max_running)
        self.trainer.take(epoch)
        self.role = "rollout"
        await self.report()
        self.taken.set()
        log.info("cell %s: taken, epoch %d", self.name, epoch)

    async def central_trainer(self) -> TrainerClient:
        """Where central's trainer listens now. An agent at a loopback address shares a machine with all the others.

        Raises TrainerUnavailable where it is to be reached over the network, and listens there no more or not yet.
        """
        central, run_id = self.run.central.name, self.run.run_id
        if is_loopback(self._host):
            epoch = await self.store.look(lambda s: q.cell_epoch(s, run_id, central))
            return TrainerClient(trainer_socket(self._sockets, central, epoch))
        found = await self.store.look(lambda s: q.trainer_endpoint(s, run_id, central))
        if found is None:
            raise TrainerUnavailable(
                f"cell {central}: its trainer listens at no address of the network; either it starts, or its agent has "
                "no GYRE_HOST that other machines reach"
            )
        return TrainerClient(Endpoint(**found))

    async def keep(self) -> None:
        """Keep both processes and the row until cancelled; then end them, and say so in the row.

        Raises FencedError, in a group, when another agent has taken the cell.
        """
        await self.take()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.store.until_fenced())
                tasks.create_task(self.trainer.keep(self.report))
                tasks.create_task(self.engine.keep(self.engine_changed))
                tasks.create_task(self._beat())
        finally:
            # Both at once: each may take seconds to end.
            await asyncio.gather(asyncio.to_thread(self.engine.stop), asyncio.to_thread(self.trainer.stop))
            self.trainer.incarnation = self.trainer.endpoint = None
            self.role = "down"
            # The row may be another's by now, or the database be what is missing: that was waited for already.
            with contextlib.suppress(FencedError, OperationalError, TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await self.report()

    async def engine_changed(self) -> None:
        """The engine came or went. One that comes while the cell trains gives its memory to the trainer."""
        if self.engine.ready.is_set() and self.role in ("to_train", "train"):
            await self.engine.release()
        await self.report()

    async def set_role(self, role: Role) -> None:
        """Take a role and report it."""
        self.role = role
        await self.report()

    async def report(self) -> None:
        """Write the row as things are now."""
        async with self._reporting:  # an older state must not overtake a newer one
            engine = self.engine
            serves = self.role == "rollout" and engine.ready.is_set() and not engine.released
            await self.store.report(
                central=self.central,
                role=self.role,
                engine_url=engine.url,
                routable=serves,
                admits=engine.admits,
                serving_version=engine.version if engine.ready.is_set() else None,
                max_running=self.run.serving.max_running,
                kv_tokens=self.run.serving.kv_tokens,
                engine_incarnation=engine.incarnation,
                trainer_incarnation=self.trainer.incarnation,
                trainer_endpoint=None if self.trainer.endpoint is None else self.trainer.endpoint.to_json(),
            )

    def phases(self) -> Phases:
        """For a change of role that begins now, with the memory of the server's and the trainer's processes."""
        pids = {"engine": family(self.engine.process.pid), "trainer": family(self.trainer.pid)}
        return Phases(lambda: {name: rss_mb(mine) for name, mine in pids.items()})

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await self.report()


class Phases:
    """Seconds of each phase of a change of role, and the memory of the cell's processes before the first and after
    each."""

    def __init__(self, memory: Callable[[], dict[str, float]] = dict) -> None:
        self._memory = memory
        self.seconds: dict[str, float] = {}
        self.rss_mb = {"before": memory()}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block as phase `name`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - started, 4)
            self.rss_mb[name] = self._memory()


def _on_this_machine(run: RunConfig, name: str) -> CellConfig:
    """The cell, pinned to cores that this process may use."""
    cell = next(c for c in run.cells if c.name == name)
    cores = usable_cores(cell.cpus, [n for c in run.cells for n in c.cpus], os.sched_getaffinity(0))
    if cores == cell.cpus:
        return cell
    log.warning("cell %s: the run's cores are not all this machine's; %s instead of %s", name, cores, cell.cpus)
    return cell.model_copy(update={"cpus": cores})
