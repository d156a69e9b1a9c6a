"""Two cells of a run whose trainers are real and whose engines never start: what trains, dies, and begins anew."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from sqlalchemy import select
from temporalio.testing import ActivityEnvironment

from gyre.ports import LOOPBACK
from gyre.store import queries as q
from gyre.store.db import transaction
from gyre.store.models import MicroBatch, Step
from gyre.training.batch import pack_rows
from gyre.training.trainer import Trainer
from gyre.training.weights import read_hf_weights
from tests.cells.agent import CENTRAL, SATELLITE, Agent
from tests.settings import worker_settings
from tests.training.world import World
from workflows import messages as m

T = TypeVar("T")


class Pair:
    """A central cell and a satellite, and the steps that they train. `cells`: those whose agents are here."""

    def __init__(
        self, world: World, database: str, data: Path, *, cells: Sequence[str] = (CENTRAL, SATELLITE),
        host: str = LOOPBACK,
    ) -> None:  # fmt: skip
        self.world, self.db, self.run = world, world.engine, world.config
        self.settings = worker_settings(self.run, database, data, host=host)
        self.agents = {name: Agent(self.settings, name) for name in cells}
        self._alone: Trainer | None = None

    @property
    def sockets(self) -> Path:
        return self.settings.sockets

    async def start(self) -> None:
        await asyncio.gather(*(agent.start() for agent in self.agents.values()))

    async def stop(self) -> None:
        await asyncio.gather(*(agent.stop() for agent in self.agents.values()))

    async def replace(self, cell: str, database: str | None = None) -> Agent:
        """A second agent of the cell, while the first one is still there; which it was. `database`: its way to it."""
        before = self.agents[cell]
        found = self.settings if database is None else self.settings.model_copy(update={"database_url": database})
        self.agents[cell] = Agent(found, cell)
        await self.agents[cell].start()
        return before

    # ---- steps ----------------------------------------------------------------------------------------------------

    def next_step(self) -> Step:
        with transaction(self.db) as session:
            newest = q.newest_version(session, self.run.run_id)
            index = 0 if newest is None else newest.version
        step_id = self.world.step(index)
        with transaction(self.db) as session:
            return q.step_row(session, step_id)

    async def finish(self, step: Step) -> m.FinishedStep:
        """Central's end of the step, as its activity."""
        activities = self.agents[CENTRAL].activities
        async with asyncio.timeout(120):
            return await self.act(activities.finish_step, m.FinishStep(self.run.run_id, step.id))

    async def act(self, activity: Callable[[Any], Awaitable[T]], argument: Any) -> T:
        return await ActivityEnvironment().run(activity, argument)

    async def until(self, true: Callable[[], object], what: str, limit_s: float = 90) -> None:
        """Wait for `true`, which may be asynchronous."""
        for _ in range(int(limit_s / 0.05)):
            found = true()
            if await found if isinstance(found, Awaitable) else found:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{what}: not within {limit_s:g} s")

    # ---- what came of it ------------------------------------------------------------------------------------------

    def rows(self, step: Step) -> list[MicroBatch]:
        with transaction(self.db) as session:
            query = select(MicroBatch).where(MicroBatch.step_id == step.id).order_by(MicroBatch.id)
            return list(session.scalars(query))

    def folder(self, version: int) -> Path:
        with transaction(self.db) as session:
            row = q.weight_version(session, self.run.run_id, version)
        assert row is not None, f"version {version} was not made"
        return Path(row.checkpoint)

    def check(self, step: Step) -> None:
        """The step's version is what one trainer in peace makes of the version before it: 1e-5 of its length."""
        assert {(row.state, row.step_id) for row in self.rows(step)} == {("done", step.id)}
        before, made = self.folder(step.index), read_hf_weights(self.folder(step.index + 1))
        if self._alone is None:
            self._alone = Trainer(self.run.policy.path, self.run.trainer, self.run.objective)
        alone = self._alone
        alone.load(step.index, before)
        with transaction(self.db) as session:
            batches = [q.micro_batch_rows(session, row.id) for row in self.rows(step)]
            done = q.step_row(session, step.id)
        for rows in batches:
            alone.micro_batch(pack_rows(rows), "alone")
        assert done.n_valid is not None
        norm = alone.optimizer_step(done.n_valid).grad_norm
        assert abs(done.metrics["grad_norm"] / norm - 1) < 1e-5
        assert done.metrics["micro_batches"] == len(batches)
        was, expected = read_hf_weights(before), alone.export_hf()
        moved = distance(was, expected)
        assert moved > 1e-3, "a step that changes nothing proves nothing"
        assert distance(made, expected) < 1e-5 * length(expected)

    def published(self, version: int) -> dict[str, Any] | None:
        with transaction(self.db) as session:
            row = q.weight_version(session, self.run.run_id, version)
            return None if row is None else row.ticket


def length(weights: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([t.flatten().double() for t in weights.values()]).norm())


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return length({name: a[name].double() - b[name].double() for name in a})
