"""A cell that is about to continue as new first waits until its role is reported; what it is told meanwhile counts."""

from __future__ import annotations

import asyncio

import pytest
from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from tests.workflows.script import Script, plan
from workflows import messages as m
from workflows.cell import Cell
from workflows.names import cell_workflow


async def test_a_stop_before_it_continues_as_new_ends_it(impatient: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []

    async def late(self: Cell) -> None:
        """A report that arrives when the cell has been told to stop."""
        waits.append(self._name)
        await workflow.wait_condition(lambda: self._stopped)

    monkeypatch.setattr(Cell, "_all_reported", late)
    script = Script(plan())
    flow = Worker(impatient, task_queue="flow", workflows=[Cell], workflow_runner=UnsandboxedWorkflowRunner())
    async with script.workers(impatient), flow:
        handle = await impatient.start_workflow(
            Cell.run, m.CellInput(script.plan, "c0"), id=cell_workflow(script.plan.run_id, "c0"), task_queue="flow"
        )
        version = 0
        while not waits:  # new weights until the server asks for a new history
            version += 1
            assert version < 1000
            await handle.signal(Cell.new_version, version)
            await asyncio.sleep(0.05)
        await handle.signal(Cell.stop)
        await handle.result(follow_runs=False)  # raises where it continued as new
