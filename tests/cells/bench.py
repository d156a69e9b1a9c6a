"""What the tests of cells do to a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Engine, select
from temporalio.testing import ActivityEnvironment

from activities.cell import CellActivities
from activities.cell_site import CellSite
from gyre.config import RunConfig
from gyre.ports import LOOPBACK
from gyre.store import queries as q
from gyre.store.db import transaction
from gyre.store.handout import hand_out
from gyre.store.models import Cell, MicroBatch, RoleChange, WeightVersion
from tests.serving.calls import generate, logprobs
from tests.settings import worker_settings
from tests.store.world import record_answer

T = TypeVar("T")


@dataclass
class Step:
    id: int
    index: int
    group_id: int
    open_groups: list[int]


class Bench:
    """`central` is the cell c0, `satellite` c1; activities run as a worker would run them."""

    def __init__(self, run: RunConfig, db: Engine, database: str, data: Path, host: str = LOOPBACK) -> None:
        self.run, self.db = run, db
        settings = worker_settings(run, database, data, host=host)
        places = {"logs": settings.logs, "sockets": settings.sockets, "env": settings.to_env(), "host": host}
        self.central = CellSite(run, "c0", db, **places)  # type: ignore[arg-type]
        self.satellite = CellSite(run, "c1", db, **places)  # type: ignore[arg-type]
        self.on_central, self.on_satellite = CellActivities(self.central), CellActivities(self.satellite)

    # ---- activities -----------------------------------------------------------------------------------------------

    async def act(self, activity: Callable[[Any], Awaitable[T]], argument: Any, limit_s: float = 300) -> T:
        async with asyncio.timeout(limit_s):
            return await ActivityEnvironment().run(activity, argument)

    def train(
        self, activity: Callable[[Any], Awaitable[T]], argument: Any
    ) -> tuple[asyncio.Task[T], ActivityEnvironment]:
        """Start an activity that runs until `env.cancel()`."""
        env = ActivityEnvironment()
        return asyncio.create_task(env.run(activity, argument)), env  # type: ignore[arg-type]

    # ---- rows -----------------------------------------------------------------------------------------------------

    def cell(self, name: str = "c1") -> Cell:
        with transaction(self.db) as session:
            return next(c for c in q.cells(session, self.run.run_id) if c.name == name)

    def micro_batches(self, step: Step) -> list[MicroBatch]:
        with transaction(self.db) as session:
            return list(
                session.scalars(select(MicroBatch).where(MicroBatch.step_id == step.id).order_by(MicroBatch.id))
            )

    def role_changes(self) -> list[RoleChange]:
        with transaction(self.db) as session:
            return list(session.scalars(select(RoleChange).order_by(RoleChange.id)))

    def version(self, version: int) -> WeightVersion | None:
        with transaction(self.db) as session:
            return q.weight_version(session, self.run.run_id, version)

    async def until(self, true: Callable[[], bool], limit_s: float = 300) -> None:
        async with asyncio.timeout(limit_s):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    # ---- a step's rollouts ----------------------------------------------------------------------------------------

    async def sample_step(
        self, index: int, rewards: tuple[float, ...] = (1, 0, 1, 0), *, open_group: bool = False
    ) -> Step:
        """Open step `index` with one group whose rollouts the satellite's engine samples, where its row says that it
        is, as a gateway records them.

        `open_group`: another group stays open until `close`.
        """
        with transaction(self.db) as session:
            step_id = q.open_step(session, self.run.run_id, index, index)
            tasks = [q.TaskRef(f"org/task-{i}", "/task", "f") for i in range(1 + open_group)]
            group, *others = q.create_groups(session, tasks, step_id=step_id)
            rollouts = q.create_rollouts(session, group, len(rewards), temperature=1.0, harness="command")
        url = self.cell().engine_url
        assert url is not None
        prompts = [list(range(20 + 7 * i, 60 + 7 * i)) for i in range(len(rewards))]
        answers = await asyncio.gather(*[generate(url, p, 50) for p in prompts])
        with transaction(self.db) as session:
            for rollout, prompt, answer, reward in zip(rollouts, prompts, answers, rewards, strict=True):
                self._record(session, rollout, prompt, answer)
                q.settle_rollout(session, rollout, "completed", reward)
        return Step(step_id, index, group, others)

    def _record(self, session: Any, rollout: str, prompt: list[int], answer: dict[str, Any]) -> None:
        spans = [[int(s["version"]), s["start"], s["end"]] for s in answer["meta_info"]["weight_versions"]]
        record_answer(session, rollout, prompt, answer["output_ids"], logprobs(answer), spans)

    def hand_out(self, step: Step) -> int:
        """Queue the step's micro-batches; how many."""
        with transaction(self.db) as session:
            given = hand_out(session, step.group_id, branch_cap=5, micro_batch_tokens=128, normalize_std=True)
        return given.micro_batches

    def close(self, step: Step) -> None:
        with transaction(self.db) as session:
            for group in step.open_groups:
                [lost] = q.create_rollouts(session, group, 1, temperature=1.0, harness="command")
                q.settle_rollout(session, lost, "infrastructure", None, "no model call")
                hand_out(session, group, branch_cap=5, micro_batch_tokens=128, normalize_std=True)
            q.close_step(session, step.id)
