"""TrainingRun with every other workflow, over scripted activities."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from temporalio import activity
from temporalio.client import (
    Client,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowUpdateFailedError,
    WorkflowUpdateStage,
)
from temporalio.exceptions import ApplicationError

from tests.workflows.script import LIMIT_S, Script, plan
from workflows import messages as m
from workflows.names import CONTROL_QUEUE, cell_workflow, scheduler_workflow, step_workflow
from workflows.run import TrainingRun


async def start(client: Client, script: Script) -> WorkflowHandle[TrainingRun, m.RunResult]:
    return await client.start_workflow(
        TrainingRun.run, m.TrainingRunInput(script.plan), id=script.plan.run_id, task_queue=CONTROL_QUEUE
    )


class Gate:
    """Holds rollouts until it opens."""

    is_open = False

    def __call__(self, rollout: str) -> bool:
        return not self.is_open


async def until(condition: Callable[[], bool], within_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("policy", ["elastic", "colocate", "async"])
async def test_a_run_of_two_steps(client: Client, policy: str) -> None:
    script = Script(plan(policy=policy))
    async with script.workers(client):
        result = await script.run(client)
    assert (result.state, result.steps_done, result.version) == ("done", 2, 2)
    assert script.happened("finish") == ["0", "1"]
    assert len(script.settled) == 8 and set(script.settled.values()) == {""}
    assert [sum(cells.values()) for cells in script.trained.values()] == [2, 2]
    assert script.under_served == []
    assert script.happened("end") == ["done"]
    order = [what for what, _ in script.log if what in ("hand_out", "train", "finish")]
    if policy == "async":  # the split is made once
        assert order.count("train") == 1 and script.roles == {"c0": "train", "c1": "rollout"}
    if policy == "colocate":  # both cells train only after the step's last group
        assert order[:4] == ["hand_out", "hand_out", "train", "train"]


async def test_elastic_trains_a_finished_group_while_another_runs(client: Client) -> None:
    chosen = plan(steps=1, min_backlog_tokens=100)
    straggler = f"{chosen.run_id}/s0/01/01"
    gate = Gate()
    script = Script(chosen, held=lambda rollout: rollout == straggler and gate(rollout))
    async with script.workers(client):
        await start(client, script)
        await until(lambda: sum(script.trained.get(0, {}).values()) > 0)
        await until(lambda: straggler in script.live)  # it may be in preparation yet; the other cell serves it
        assert script.roles == {"c0": "train", "c1": "rollout"}
        gate.is_open = True
        await until(lambda: script.happened("end") == ["done"])
    assert script.under_served == []


async def test_a_cell_that_an_earlier_run_left_training_serves_again(client: Client) -> None:
    script = Script(plan(steps=1), roles={"c0": "train", "c1": "train"})
    async with script.workers(client):
        result = await script.run(client)
    assert (result.state, result.version) == ("done", 1)
    assert sorted(script.happened("rollout")[:2]) == ["c0", "c1"]


async def test_evaluations_come_first_last_and_every_n_steps(client: Client) -> None:
    script = Script(plan(steps=3, heldout=True, evaluate_every=2, groups_per_step=1))
    async with script.workers(client):
        result = await script.run(client)
    assert (result.state, result.version) == ("done", 3)
    assert [(k, v) for k, v in script.log if k in ("evaluate", "finish")] == [
        ("evaluate", "0"), ("finish", "0"), ("finish", "1"), ("evaluate", "2"), ("finish", "2"), ("evaluate", "3"),
    ]  # fmt: skip


@pytest.mark.parametrize("staleness", [0, 1])
async def test_no_more_steps_are_open_than_staleness_allows(client: Client, staleness: int) -> None:
    chosen = plan(steps=4, max_staleness=staleness, max_concurrent=3)
    script = Script(
        chosen,
        harness=lambda rollout: 0.15,
        # The first step does not end before all are open that may be.
        held=lambda rollout: "/s0/" in rollout and len(script.happened("open")) <= staleness,
    )
    async with script.workers(client):
        result = await script.run(client)
    assert result.version == 4 and script.happened("finish") == ["0", "1", "2", "3"]
    done, most = 0, 0
    for what, whom in script.log:
        if what == "finish":
            done += 1
        if what == "open":
            assert int(whom) <= done + staleness
            most = max(most, int(whom) - done + 1)
    assert most == staleness + 1
    assert script.peak <= 3  # the launch window is shared by the open steps


class SlowToOpen(Script):
    """A step that opens alone has the whole window, and says so late."""

    @activity.defn(name="open_step")
    async def slow(self, x: m.OpenStep) -> m.OpenedStep:
        opened = await Script.open_step(self, x)
        if x.index == 0:
            await until(lambda: 1 in self.trained)
            await asyncio.sleep(0.5)  # the scheduler hears of the next step
        return opened

    open_step = slow  # type: ignore[assignment]


async def test_the_window_is_kept_when_the_older_step_is_heard_of_last(client: Client) -> None:
    gate = Gate()
    script = SlowToOpen(plan(steps=2, max_staleness=1, max_concurrent=3), held=gate)
    async with script.workers(client):
        handle = await start(client, script)
        await until(lambda: len(script.live) == 3)
        assert {rollout.split("/")[1] for rollout in script.live} == {"s0"}
        gate.is_open = True
        assert (await handle.result()).state == "done"
    assert script.peak == 3


async def test_whole_groups_are_launched_first_in_the_order_that_the_step_says(client: Client) -> None:
    chosen = plan(steps=1, groups_per_step=4, max_concurrent=2)
    script = Script(chosen, harness=lambda rollout: 0.05, launches=[2, 0, 3, 1])
    async with script.workers(client):
        await script.run(client)
    groups = [rollout.split("/")[2] for rollout in script.happened("prepare")]
    assert groups == ["02", "02", "00", "00", "03", "03", "01", "01"]
    assert script.peak <= 2


async def test_pause_and_resume(client: Client) -> None:
    gate = Gate()
    script = Script(plan(steps=2, max_concurrent=2), held=gate)
    async with script.workers(client):
        handle = await start(client, script)
        await until(lambda: len(script.live) == 2)
        assert (await handle.execute_update(TrainingRun.pause)).state == "paused"
        with pytest.raises(WorkflowUpdateFailedError, match="failed") as refused:
            await handle.execute_update(TrainingRun.pause)
        assert "paused already" in str(refused.value.cause)
        gate.is_open = True
        await until(lambda: not script.live)
        launched = len(script.happened("prepare"))
        await asyncio.sleep(0.6)
        assert len(script.happened("prepare")) == launched < 8
        assert (await handle.query(TrainingRun.status)).state == "paused"
        assert (await handle.execute_update(TrainingRun.resume)).state == "running"
        assert (await handle.result()).state == "done"
    assert script.happened("mark") == ["paused", "running"]
    assert len(script.settled) == 8


class SlowToPause(Script):
    """The database cannot be told of a pause before `told` is set, and then not at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.told = asyncio.Event()

    @activity.defn(name="mark_run")
    async def slow(self, x: m.MarkRun) -> None:
        if x.state == "paused" and activity.info().attempt == 1:
            await self.told.wait()
            raise ApplicationError("the database does not answer")
        await Script.mark_run(self, x)

    mark_run = slow  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("then", "argument", "last"),
    [(TrainingRun.resume, [], ("mark", "running")), (TrainingRun.stop, [m.StopRun()], ("end", "stopped"))],
)
async def test_the_database_hears_the_last_word_last(
    client: Client, then: Callable[..., object], argument: list[object], last: tuple[str, str]
) -> None:
    gate = Gate()
    script = SlowToPause(plan(steps=1), held=gate)
    async with script.workers(client):
        handle = await start(client, script)
        await until(lambda: len(script.live) == 4)
        accepted = WorkflowUpdateStage.ACCEPTED
        pausing = await handle.start_update(TrainingRun.pause, wait_for_stage=accepted)
        second = await handle.start_update(then, args=argument, wait_for_stage=accepted)
        if last[0] == "end":
            await until(lambda: not script.live)
        script.told.set()
        await pausing.result()
        await second.result()
        gate.is_open = True
        await asyncio.wait_for(handle.result(), LIMIT_S)
    told = [line for line in script.log if line[0] in ("mark", "end")]
    assert told[:2] == [("mark", "paused"), last]


async def test_stop_ends_live_rollouts(client: Client) -> None:
    script = Script(plan(), harness=lambda rollout: 60.0)
    async with script.workers(client):
        handle = await start(client, script)
        await until(lambda: len(script.live) == 4)
        assert (await handle.execute_update(TrainingRun.stop, m.StopRun())).state == "stopping"
        result = await asyncio.wait_for(handle.result(), LIMIT_S)
        for workflow_id in (scheduler_workflow(script.plan.run_id), cell_workflow(script.plan.run_id, "c0")):
            await asyncio.wait_for(client.get_workflow_handle(workflow_id).result(), LIMIT_S)
    assert (result.state, result.steps_done) == ("stopped", 0)
    assert sorted(script.happened("killed")) == sorted(script.settled)
    assert list(script.settled.values()) == ["cancelled"] * 4
    assert script.happened("end") == ["stopped"]


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_stop_during_an_evaluation(client: Client, how: str) -> None:
    script = Script(plan(heldout=True), harness=lambda rollout: 60.0)
    async with script.workers(client):
        handle = await start(client, script)
        await until(lambda: len(script.live) == 4)
        assert (await handle.query(TrainingRun.status)).state == "evaluating"
        if how == "stop":
            await handle.execute_update(TrainingRun.stop, m.StopRun())
        else:
            await handle.cancel()
        result = await asyncio.wait_for(handle.result(), LIMIT_S)
        await until(lambda: len(script.settled) == 4)
    assert (result.state, result.steps_done) == ("stopped", 0)
    assert list(script.settled.values()) == ["cancelled"] * 4
    assert script.happened("end") == ["stopped"] and script.evaluated == []


async def test_cancelling_the_run_ends_its_steps(client: Client) -> None:
    script = Script(plan(), harness=lambda rollout: 60.0)
    async with script.workers(client):
        handle = await start(client, script)
        await until(lambda: len(script.live) == 4)
        await handle.cancel()
        assert (await asyncio.wait_for(handle.result(), LIMIT_S)).state == "stopped"
    assert list(script.settled.values()) == ["cancelled"] * 4


async def test_stop_after_the_open_step(client: Client) -> None:
    gate = Gate()
    script = Script(plan(steps=5), held=gate)
    async with script.workers(client):
        handle = await start(client, script)
        await until(lambda: len(script.live) == 4)
        await handle.execute_update(TrainingRun.stop, m.StopRun(wait=True))
        gate.is_open = True
        result = await asyncio.wait_for(handle.result(), LIMIT_S)
    assert (result.state, result.steps_done, result.version) == ("stopped", 1, 1)
    assert set(script.settled.values()) == {""}


async def test_one_cancelled_rollout_does_not_stop_its_step(client: Client) -> None:
    chosen = plan(steps=1)
    hung = f"{chosen.run_id}/s0/00/01"
    script = Script(chosen, harness=lambda rollout: 60.0 if rollout == hung else 0.0)
    async with script.workers(client):
        handle = await start(client, script)
        await until(lambda: hung in script.live and len(script.settled) == 3)
        await client.get_workflow_handle(hung).cancel()
        assert (await asyncio.wait_for(handle.result(), LIMIT_S)).state == "done"
    assert script.settled[hung] == "cancelled" and len(script.settled) == 4


async def test_a_step_that_cannot_go_on_fails_the_run_with_its_reason(client: Client) -> None:
    class Broken(Script):
        @activity.defn(name="hand_out_group")
        async def broken(self, x: m.HandOut) -> m.HandedOut:
            raise ApplicationError("tree of t/s0/00/00: node 7 has no parent", type="ValueError")

        hand_out_group = broken  # type: ignore[assignment]

    script = Broken(plan())
    async with script.workers(client):
        handle = await start(client, script)
        with pytest.raises(WorkflowFailureError) as failed:
            await asyncio.wait_for(handle.result(), LIMIT_S)
    assert "step 0" in str(failed.value.cause)
    assert script.happened("end") == ["failed"]


async def test_the_ui_explains_itself(client: Client) -> None:
    gate = Gate()
    script = Script(plan(steps=1), held=gate)
    async with script.workers(client):
        handle = await start(client, script)
        await until(lambda: len(script.live) == 4)
        run_id = script.plan.run_id
        details = {}
        for workflow_id in (run_id, step_workflow(run_id, 0), f"{run_id}/s0/00/00", cell_workflow(run_id, "c0"),
                            scheduler_workflow(run_id)):  # fmt: skip
            metadata = await client.get_workflow_handle(workflow_id).query("__temporal_workflow_metadata")
            details[workflow_id.removeprefix(run_id)] = metadata.current_details
        rollout = await client.get_workflow_handle(f"{run_id}/s0/00/00").describe()
        summaries = [
            event.user_metadata.summary.data.decode()
            async for event in client.get_workflow_handle(f"{run_id}/s0/00/00").fetch_history_events()
            if event.HasField("activity_task_scheduled_event_attributes")
        ]
        gate.is_open = True
        await handle.result()
        attributes = {key.name: value for key, value in rollout.typed_search_attributes}
    assert "0 of 1 done, open [0]" in details[""]
    assert "4 running" in details["/step-0"] and "0 of 2 handed out" in details["/step-0"]
    assert "scripted runs on host-under-test, limit 30 s" in details["/s0/00/00"]
    assert "c0**: rollout" in details["/cell-c0"]
    assert "water level 4" in details["/scheduler"]
    assert summaries == ['"workspace of task-0"', '"scripted on host-under-test, limit 30 s"']
    assert attributes["GyreRun"] == run_id and attributes["GyreStep"] == 0 and attributes["GyreTask"] == "task-0"


async def test_everything_continues_as_new_in_the_midst_of_work(impatient: Client) -> None:
    """Open steps, roles and versions are carried over."""
    script = Script(plan(steps=6, max_staleness=1, groups_per_step=2, policy="colocate"))
    async with script.workers(impatient):
        result = await script.run(impatient)
    assert (result.state, result.version) == ("done", 6)
    assert script.happened("finish") == [str(i) for i in range(6)]
    assert len(script.settled) == 24 and set(script.settled.values()) == {""}
    for workflow_id in (
        script.plan.run_id,
        scheduler_workflow(script.plan.run_id),
        cell_workflow(script.plan.run_id, "c0"),
    ):
        first = [e async for e in impatient.list_workflows(f"WorkflowId = '{workflow_id}'")]
        assert len(first) > 1, f"{workflow_id} never continued as new"
