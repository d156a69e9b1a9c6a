"""Who is told something gets it, also where it is only about to start, and hears the newest last."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from tests.workflows.script import LIMIT_S, Script, plan
from tests.workflows.test_training_run import Gate, start, until
from workflows import messages as m
from workflows.names import evaluation_workflow, step_workflow
from workflows.observe import Observer
from workflows.run import TrainingRun


@pytest.mark.parametrize(("what", "first"), [("TrainingStep", "index"), ("Evaluation", "version")])
async def test_what_is_about_to_start_hears_of_a_pause(
    client: Client, monkeypatch: pytest.MonkeyPatch, what: str, first: str
) -> None:
    begins, starting = workflow.start_child_workflow, list[str]()

    async def late(name: str, argument: Any, **options: Any) -> object:
        """The first one of its kind, also when it is replayed, starts when the run has been told to pause."""
        if (name, getattr(argument, first, None)) == (what, 0):
            starting.append(name)
            await workflow.wait_condition(lambda: workflow.instance()._state.paused)
            await workflow.sleep(1)  # a signal that does not wait for the start is lost by now
        return await begins(name, argument, **options)

    monkeypatch.setattr(workflow, "start_child_workflow", late)
    script = Script(plan(steps=1, heldout=what == "Evaluation"))
    child = {"TrainingStep": step_workflow, "Evaluation": evaluation_workflow}[what](script.plan.run_id, 0)
    async with script.workers(client):
        handle = await start(client, script)
        await until(lambda: bool(starting))
        assert (await handle.execute_update(TrainingRun.pause)).state == "paused"
        told = [
            event.workflow_execution_signaled_event_attributes.signal_name
            async for event in client.get_workflow_handle(child).fetch_history_events()
            if event.HasField("workflow_execution_signaled_event_attributes")
        ]
        assert told[:1] == ["pause"]
        await handle.execute_update(TrainingRun.resume)
        assert (await asyncio.wait_for(handle.result(), LIMIT_S)).state == "done"


class Long(Script):
    """Its trainers hear that they are called back, and compute on until `done` is set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.done = asyncio.Event()

    @activity.defn(name="cell_train")
    async def long(self, x: m.CellTrain) -> m.CellTrained:
        trained = await Script.cell_train(self, x)
        self.log.append(("called back", x.cell))
        await self.done.wait()
        return trained

    cell_train = long  # type: ignore[assignment]


async def test_a_run_that_goes_on_keeps_the_cells_that_have_not_ended(client: Client) -> None:
    """They were told to stop by the run before, which ended first; without them this one would wait for ever."""
    gate = Gate()
    script = Long(plan(steps=1, min_backlog_tokens=100), held=lambda rollout: rollout[-5:] == "01/01" and gate(rollout))
    async with script.workers(client):
        handle = await start(client, script)
        await until(lambda: script.roles["c0"] == "train")
        await handle.execute_update(TrainingRun.stop, m.StopRun())
        assert (await asyncio.wait_for(handle.result(), LIMIT_S)).state == "stopped"
        await until(lambda: ("called back", "c0") in script.log)
        gate.is_open = True
        script.settled.clear()
        handle = await start(client, script)
        await until(lambda: script.happened("open") == ["0", "0"])
        script.done.set()
        assert (await asyncio.wait_for(handle.result(), LIMIT_S)).state == "done"


class Slow:
    """A scheduler's handle: the first signal arrives when `answers` is set."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.answers = False

    async def signal(self, _: str, state: m.Observation) -> None:
        self.log.append(f"sent, running {state.running}")
        if len(self.log) == 1:
            await workflow.wait_condition(lambda: self.answers)
        self.log.append(f"arrived, running {state.running}")


@workflow.defn
class Source:
    """Reports twice, the second time while the first report is on its way."""

    @workflow.run
    async def run(self) -> list[str]:
        state, scheduler = m.Observation("step-0", 0, 0, 3, 1, 0, 8), Slow()
        observer = Observer("nobody", lambda: state)
        observer._scheduler = scheduler  # type: ignore[assignment]
        observer.changed()
        observing = asyncio.create_task(observer.run())
        await workflow.wait_condition(lambda: bool(scheduler.log))
        state = replace(state, running=0, done=True)
        last = asyncio.create_task(observer.report())
        await workflow.sleep(0.01)
        scheduler.answers = True
        await last
        observing.cancel()
        return scheduler.log


async def test_a_report_waits_for_the_one_on_its_way(client: Client) -> None:
    """Or the scheduler might hear that a step is done, and then that it runs."""
    name = plan().run_id
    async with Worker(client, task_queue=name, workflows=[Source], workflow_runner=UnsandboxedWorkflowRunner()):
        log = await client.execute_workflow(Source.run, id=name, task_queue=name)
    assert log == ["sent, running 3", "arrived, running 3", "sent, running 0", "arrived, running 0"]
