"""Two paced cells under Gyre's own agent, ledger and transfer: one step, trained by both, each token exactly once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, func, select
from temporalio.testing import ActivityEnvironment

from activities.cell import CellActivities
from activities.cell_site import CellSite, Programs
from benchmarks.elastic.agent import PacedProcess
from benchmarks.elastic.answers import Answers
from benchmarks.elastic.costs import write_costs
from benchmarks.elastic.paced import POLICY
from gyre.config import RunConfig
from gyre.gateway.engine import EngineClient, EngineRequest
from gyre.store import queries as q
from gyre.store.db import transaction
from gyre.store.handout import hand_out
from gyre.store.models import MicroBatch, RoleChange
from gyre.store.models import Step as StepRow
from gyre.training.protocol import TrainerStatus
from tests.paced.test_engine import COST
from tests.settings import worker_settings
from tests.store.world import record_answer
from workflows import messages as m

RUN = RunConfig.model_validate(
    {
        "name": "paced", "steps": 1, "policy": {"path": str(POLICY), "context": 1024},
        "tasks": {"train": str(POLICY)}, "serving": {"max_running": 4, "kv_migration": "off"},
        "cells": [{"name": "c0", "central": True}, {"name": "c1"}], "stack": {"transfer": "socket"},
    }
)  # fmt: skip
ROLLOUTS, TOKENS = 4, 30


@dataclass
class Cells:
    db: Engine
    central: CellSite
    satellite: CellSite

    async def until(self, true: Any, limit_s: float = 90.0) -> None:
        for _ in range(int(limit_s / 0.05)):
            if await asyncio.to_thread(true):
                return
            await asyncio.sleep(0.05)
        raise AssertionError("did not come true")

    def count(self, state: str, cell: str | None = None) -> int:
        with transaction(self.db) as session:
            query = select(func.count()).select_from(MicroBatch).where(MicroBatch.state == state)
            return session.scalar(query if cell is None else query.where(MicroBatch.computed_by == cell)) or 0


@pytest.fixture
async def cells(engine: Engine, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cells]:
    settings = worker_settings(RUN, database, tmp_path)
    write_costs(tmp_path, COST)
    monkeypatch.setenv("GYRE_DATA", str(tmp_path))
    programs = Programs(PacedProcess, "benchmarks.elastic.trainer")
    places: dict[str, Any] = {"logs": settings.logs, "sockets": settings.sockets, "env": settings.to_env()}
    central, satellite = (CellSite(RUN, name, engine, **places, programs=programs) for name in ("c0", "c1"))
    keeping = [asyncio.create_task(site.keep()) for site in (central, satellite)]
    try:
        async with asyncio.timeout(300):
            for site in (central, satellite):
                await asyncio.gather(site.trainer.ready.wait(), site.engine.ready.wait())
        yield Cells(engine, central, satellite)
    finally:
        for task in keeping:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def test_a_step_of_paced_cells(cells: Cells) -> None:
    step_id, tokens = await sample(cells)
    on_central, on_satellite = CellActivities(cells.central), CellActivities(cells.satellite)
    for name, activities in (("c0", on_central), ("c1", on_satellite)):
        change = m.CellSwitch(RUN.run_id, name, "a test")
        assert (await ActivityEnvironment().run(activities.cell_to_train, change)).role == "train"
    trains, env = start(on_satellite, "c1")
    await cells.until(lambda: cells.count("queued") == 0)  # the satellite alone: all of it is pushed
    finishes = asyncio.create_task(ActivityEnvironment().run(on_central.finish_step, m.FinishStep(RUN.run_id, step_id)))
    async with asyncio.timeout(120):
        finished = await finishes
    env.cancel()
    assert (await trains).micro_batches == ROLLOUTS
    assert cells.count("done", "c1") == ROLLOUTS
    # The gradient of a paced micro-batch is its number of tokens.
    assert finished.version == 1 and finished.metrics["grad_norm"] == finished.metrics["tokens"] == tokens
    back = await ActivityEnvironment().run(on_satellite.cell_to_rollout, m.CellSwitch(RUN.run_id, "c1", "a test"))
    assert (back.role, back.version) == ("rollout", 1)
    with transaction(cells.db) as session:
        assert session.scalar(select(func.count()).select_from(RoleChange).where(RoleChange.ended_at.is_not(None))) == 3
        assert session.scalar(select(StepRow.published_at)) is not None
    status: TrainerStatus = await cells.satellite.trainer.status()
    assert status.asleep and not status.held


def start(activities: CellActivities, cell: str) -> tuple[asyncio.Task[m.CellTrained], ActivityEnvironment]:
    env = ActivityEnvironment()
    return asyncio.create_task(env.run(activities.cell_train, m.CellTrain(RUN.run_id, cell))), env


async def sample(cells: Cells) -> tuple[int, int]:
    """A closed step with one group, sampled by the satellite's engine; its row, and its tokens."""
    answers, client = Answers(POLICY), EngineClient(30.0)
    prompt = answers.encode(f"<|im_start|>user\nhello next {TOKENS}<|im_end|>\n<|im_start|>assistant\n")
    url = cells.satellite.engine.url
    assert url is not None
    request = EngineRequest("a", ",".join(map(str, prompt)).encode(), {"max_new_tokens": 99}, "v0")
    said = [token async for chunk in client.generate(url, request) for token in chunk.ids]
    await client.close()
    with transaction(cells.db) as session:
        step_id = q.open_step(session, RUN.run_id, 0, 0)
        [group] = q.create_groups(session, [q.TaskRef("org/task", "/task", "f")], step_id=step_id)
        for member, rollout in enumerate(
            q.create_rollouts(session, group, ROLLOUTS, temperature=1.0, harness="command")
        ):
            record_answer(session, rollout, prompt, said, [-0.5] * len(said), [[0, 0, len(said)]])
            q.settle_rollout(session, rollout, "completed", float(member % 2))
        hand_out(session, group, branch_cap=5, micro_batch_tokens=64, normalize_std=True)
        q.close_step(session, step_id)
    return step_id, ROLLOUTS * (len(prompt) + TOKENS)
