"""A stand-in for a cell in runs with real rows: it computes nothing and keeps the ledger."""

from __future__ import annotations

import asyncio

from sqlalchemy import Engine
from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker

from gyre.store import queries as q
from gyre.store.db import transaction
from workflows import messages as m
from workflows.names import cell_queue

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
