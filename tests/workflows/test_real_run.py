"""A whole TrainingRun over real rows, hosts and scoring; the cell alone is a stand-in that keeps the ledger."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from sqlalchemy import Engine, select, text
from temporalio.client import Client

from gyre.store.db import transaction
from gyre.store.models import Evaluation, Group, Rollout, Run, Step
from tests.workflows.ledger_cell import LedgerCell
from tests.workflows.real import RealRun
from tests.workflows.script import LIMIT_S
from tests.workflows.server import TemporalServer
from workflows import messages as m
from workflows.names import CONTROL_QUEUE


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
            LIMIT_S,
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
