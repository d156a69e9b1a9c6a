"""A whole TrainingRun over real rows, hosts and scoring; the cell alone is a stand-in that keeps the ledger."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from sqlalchemy import Engine, select, text
from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker

from gyre.store import queries as q
from gyre.store.db import transaction
from gyre.store.models import Evaluation, Group, Rollout, Run, Step
from tests.workflows.real import RealRun
from tests.workflows.server import TemporalServer
from workflows import messages as m
from workflows.names import CONTROL_QUEUE, cell_queue

TRAINER = "trainer-1"


class LedgerCell:
    """A cell that computes nothing and books everything."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @activity.defn
    async def cell_to_train(self, x: m.CellSwitch) -> m.CellSwitched:
        return m.CellSwitched("train", 0)

    @activity.defn
    async def cell_to_rollout(self, x: m.CellSwitch) -> m.CellSwitched:
        return m.CellSwitched("rollout", 1)

    @activity.defn
    async def cell_load_weights(self, x: m.CellWeights) -> m.CellServing:
        return m.CellServing(x.version)

    @activity.defn
    async def cell_train(self, x: m.CellTrain) -> m.CellTrained:
        done = 0
        try:
            while True:
                activity.heartbeat()
                with transaction(self.engine) as session:
                    step = q.oldest_unfinished_step(session, x.run_id)
                    claimed = q.claim_micro_batch(session, step, x.cell, TRAINER) if step is not None else None
                    if claimed is not None:
                        q.hold_micro_batch(session, claimed, TRAINER, {})
                        done += 1
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            return m.CellTrained(done, 0)

    @activity.defn
    async def finish_step(self, x: m.FinishStep) -> m.FinishedStep:
        while True:
            activity.heartbeat()
            with transaction(self.engine) as session:
                progress = q.step_progress(session, x.step_id)
                if progress.state == "closed" and progress.complete_at(TRAINER):
                    version = q.step_row(session, x.step_id).index + 1
                    q.finish_step(session, x.step_id, version, {}, "/nowhere", holder=TRAINER)
                    return m.FinishedStep(version)
            await asyncio.sleep(0.05)

    def worker(self, client: Client, run_id: str) -> Worker:
        activities = [
            self.cell_to_train,
            self.cell_to_rollout,
            self.cell_load_weights,
            self.cell_train,
            self.finish_step,
        ]
        return Worker(client, task_queue=cell_queue(run_id, "c0"), activities=activities)


async def test_a_run_from_task_folders_to_the_new_version(
    client: Client, engine: Engine, database: str, temporal: TemporalServer, tmp_path: Path
) -> None:
    name = f"w{os.urandom(4).hex()}"
    run = RealRun(engine, database, temporal.address, tmp_path, "sleep 0.3", name=name, heldout=True, rows=False)
    watcher = asyncio.create_task(_gateway(run))
    async with run.workers(client), LedgerCell(engine).worker(client, run.run_id):
        result: m.RunResult = await asyncio.wait_for(
            client.execute_workflow(
                "TrainingRun", m.TrainingRunInput(m.plan_of(run.config)), id=run.run_id, task_queue=CONTROL_QUEUE,
                result_type=m.RunResult,
            ),
            90,
        )  # fmt: skip
    watcher.cancel()
    assert (result.state, result.steps_done, result.version) == ("done", 1, 1)
    with transaction(engine) as session:
        assert session.get_one(Run, run.run_id).state == "done"
        step = session.scalars(select(Step)).one()
        assert (step.state, step.n_valid, step.min_version) == ("done", 4, 0)
        group = session.scalars(select(Group).where(Group.step_id == step.id)).one()
        assert (group.state, group.outcome, group.baseline) == ("handed_out", "trained", 0.5)
        rollouts = session.scalars(select(Rollout)).all()
        assert {(r.state, r.outcome, r.exclude_reason) for r in rollouts} == {("settled", "completed", None)}
        evaluations = session.scalars(select(Evaluation).order_by(Evaluation.id)).all()
        assert [(e.version, e.n_valid, e.success) for e in evaluations] == [(0, 2, 0.5), (1, 2, 0.5)]
        fates = session.execute(text("SELECT sum(tokens) FROM token_accounting")).scalar_one()
        assert fates == 2 * len(rollouts)  # every sampled token is accounted for


async def _gateway(run: RealRun) -> None:
    """Books one call for each rollout that runs; every second member of a group will be right."""
    seen: set[str] = set()
    while True:
        with transaction(run.engine) as session:
            known = session.execute(select(Rollout.id, Rollout.member).where(Rollout.state != "settled")).all()
        for rollout, member in known:
            if rollout not in seen:
                seen.add(rollout)
                run.evaluator(rollout, fails=0, reward=float(member % 2))
                run.calls(rollout)
        await asyncio.sleep(0.05)
