"""An agent that takes a cell has what its predecessor began retried at once: no heartbeat time-out is waited for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from temporalio import workflow
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.cell_engine import CellEngine
from tests.cells.agent import CENTRAL, SATELLITE, Agent
from tests.cells.link import Link
from tests.cells.pair import Pair
from tests.workflows.server import NAMESPACE, TemporalServer
from workers.takeover import release_agents_before
from workflows import messages as m
from workflows import verbs
from workflows.cell import Cell
from workflows.messages.run import plan_of
from workflows.names import cell_queue, cell_workflow, step_workflow

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def temporal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemporalServer]:
    with TemporalServer(tmp_path_factory.mktemp("temporal") / "server.log") as server:
        yield server


@workflow.defn
class Finish:
    """The end of a step alone, as TrainingStep asks for it."""

    @workflow.run
    async def run(self, step: m.FinishStep) -> m.FinishedStep:
        return await verbs.finish_step(step, CENTRAL)


class Idle(CellEngine):
    """A server that is never started, and comes back when it is told to."""

    url = incarnation = None  # type: ignore[assignment]

    async def resume(self) -> int:
        self.ready.set()
        return 0


@asynccontextmanager
async def polling(agent: Agent, client: Client, pair: Pair) -> AsyncIterator[None]:
    agent.site.engine = Idle(agent.site.store, agent.site.config, pair.settings.logs / "engine.log")
    agent.site.engine.ready.set()
    beat = timedelta(seconds=0.5)
    worker = Worker(
        client,
        task_queue=cell_queue(pair.run.run_id, agent.site.name),
        activities=agent.activities.all(),
        max_heartbeat_throttle_interval=beat,
        default_heartbeat_throttle_interval=beat,
        graceful_shutdown_timeout=timedelta(0),
    )
    async with worker:
        yield


async def the_activity(handle: WorkflowHandle) -> PendingActivityInfo | None:  # type: ignore[type-arg]
    """What the workflow has begun and a worker has taken."""
    found = (await handle.describe()).raw_description.pending_activities
    return next((a for a in found if a.state == PendingActivityState.PENDING_ACTIVITY_STATE_STARTED), None)


@pytest.mark.parametrize("cell", [SATELLITE, CENTRAL])
async def test_what_an_agent_that_is_gone_was_about_is_begun_again_at_once(
    pair: Pair, temporal: TemporalServer, cell: str
) -> None:
    """Gone without a word: its connections to Temporal end, as a kill -9 looks from there."""
    run_id, step, gone = pair.run.run_id, pair.next_step(), pair.agents[cell]
    direct = await Client.connect(temporal.address, namespace=NAMESPACE)
    flow = Worker(direct, task_queue="flow", workflows=[Cell, Finish], workflow_runner=UnsandboxedWorkflowRunner())
    async with flow, Link(temporal.address) as link:
        by_link = await Client.connect(link.address, namespace=NAMESPACE)
        async with polling(gone, by_link, pair):
            handle: WorkflowHandle = await (  # type: ignore[type-arg]
                direct.start_workflow(
                    Cell.run, m.CellInput(plan_of(pair.run), cell, "train", "train"),
                    id=cell_workflow(run_id, cell), task_queue="flow",
                )
                if cell == SATELLITE
                else direct.start_workflow(
                    Finish.run, m.FinishStep(run_id, step.id), id=step_workflow(run_id, step.index), task_queue="flow"
                )
            )  # fmt: skip

            async def taken() -> bool:
                return await the_activity(handle) is not None

            await pair.until(taken, "the agent takes the activity")
            link.drop()
            await pair.replace(cell)
            new = pair.agents[cell]
            assert await release_agents_before(direct, new.site) == 1
            assert await release_agents_before(direct, new.site) == 0
            async with polling(new, direct, pair):
                await pair.until(taken, "its successor takes the activity", limit_s=20)
                found = await the_activity(handle)
                assert found is not None and found.attempt == 2
                assert found.last_failure.application_failure_info.type == "AgentReplaced"
                async with pair.agents[CENTRAL].working():
                    await (handle.result() if cell == CENTRAL else pair.finish(step))
                pair.check(step)
                await end(handle, cell)
            link.heal()  # so that the worker before can end
    await gone.stop()


async def end(handle: WorkflowHandle, cell: str) -> None:  # type: ignore[type-arg]
    if cell == SATELLITE:
        await handle.signal(Cell.stop)
        await handle.result()


async def test_a_training_that_was_called_back_ends_with_its_agent(pair: Pair, temporal: TemporalServer) -> None:
    """The agent dies before it hears that its cell is to serve; its successor does not train first."""
    run_id, gone = pair.run.run_id, pair.agents[SATELLITE]
    direct = await Client.connect(temporal.address, namespace=NAMESPACE)
    flow = Worker(direct, task_queue="flow", workflows=[Cell], workflow_runner=UnsandboxedWorkflowRunner())
    async with flow, Link(temporal.address) as link:
        by_link = await Client.connect(link.address, namespace=NAMESPACE)
        async with polling(gone, by_link, pair):
            start = m.CellInput(plan_of(pair.run), SATELLITE, "train", "train")
            handle = await direct.start_workflow(
                Cell.run, start, id=cell_workflow(run_id, SATELLITE), task_queue="flow"
            )

            async def trains() -> bool:
                return await the_activity(handle) is not None

            async def is_called_back() -> bool:
                pending = (await handle.describe()).raw_description.pending_activities
                return any(a.state == PendingActivityState.PENDING_ACTIVITY_STATE_CANCEL_REQUESTED for a in pending)

            async def serves() -> bool:
                return (await handle.query(Cell.role)).role == "rollout"

            await pair.until(trains, "the cell trains")
            link.drop()
            await handle.signal(Cell.set_role, m.SetRole("rollout", "a test"))
            await pair.until(is_called_back, "the cell is called back")
            await pair.replace(SATELLITE)
            new = pair.agents[SATELLITE]
            assert await release_agents_before(direct, new.site) == 1
            async with polling(new, direct, pair):
                await pair.until(serves, "the cell serves")
                kinds = [e.activity_task_scheduled_event_attributes.activity_type.name
                         async for e in handle.fetch_history_events()
                         if e.HasField("activity_task_scheduled_event_attributes")]  # fmt: skip
                assert kinds == ["cell_train", "cell_to_rollout"]
                await end(handle, SATELLITE)
            link.heal()
    await gone.stop()
