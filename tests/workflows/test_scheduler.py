"""ElasticScheduler with real Cell workflows: what was measured reaches the policy, and time passes without reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from temporalio import activity
from temporalio.client import Client, WorkflowHandle

from tests.workflows.script import LIMIT_S, Script, plan
from workflows import messages as m
from workflows.names import CONTROL_QUEUE, cell_workflow, scheduler_workflow
from workflows.scheduler import ElasticScheduler

STEP = m.Observation("step-0", 0, queued=0, running=1, open_groups=1, ready_tokens=500, window=8)
CHEAP = m.ClusterFacts(train_tokens_s=1000.0, to_train_s=0.01, to_rollout_s=0.01)


@dataclass
class Night:
    """A scheduler and its cells, without a run; `facts` are what the next look will find."""

    script: Script
    client: Client
    handle: WorkflowHandle[ElasticScheduler, None]
    facts: m.ClusterFacts
    before: tuple[str, ...] = ("rollout",) * 3  # roles that were waited for last
    asked: int = 0  # role changes since the beginning

    def backlog(self, micro_batches: int) -> None:
        """Of 100 tokens each, which nobody takes away."""
        self.script.backlog[0] = micro_batches

    async def observe(self, observation: m.Observation) -> None:
        await self.handle.signal(ElasticScheduler.observe, observation)

    async def view(self) -> m.SchedulerView:
        return await self.handle.query(ElasticScheduler.view)

    async def says(self, text: str, workflow_id: str | None = None) -> None:
        """Wait until the details of a workflow (the scheduler's) have this text: a view shows what is not told yet."""
        handle = self.client.get_workflow_handle(workflow_id or self.handle.id)

        async def told() -> bool:
            return text in (await handle.query("__temporal_workflow_metadata")).current_details

        await until(told, text)

    async def looked(self, observation: m.Observation) -> m.SchedulerView:
        """Report that; the view after a look at what is now in `facts`."""
        before = self.script.looks
        await self.observe(observation)
        await until(lambda: self.looks_after(before))
        return await self.view()

    async def looks_after(self, before: int) -> bool:
        return self.script.looks > before and await self._settled()

    async def _settled(self) -> bool:
        return (await self.view()).facts == replace(self.facts, backlog_tokens=100 * self.script.backlog[0])

    async def roles(self, *expected: str) -> m.SchedulerView:
        """Wait until the cells have these roles, and it is known that each was told: a cell may be the quicker one."""
        self.asked += sum(now != before for now, before in zip(expected, self.before, strict=False))
        self.before = expected

        async def reached() -> bool:
            seen = await self.view()
            return list(seen.roles.values()) == list(expected) and seen.switches >= self.asked

        await until(reached, str(expected))
        return await self.view()


async def until(condition: Callable[[], Awaitable[bool]], what: str = "a look", within_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, f"did not come about in time: {what}"
        await asyncio.sleep(0.05)


class Idle(Script):
    """Its trainers leave the backlog as it is, so that a test alone says what it is."""

    @activity.defn(name="cell_train")
    async def idle(self, x: m.CellTrain) -> m.CellTrained:
        while not activity.is_cancelled():
            activity.heartbeat()
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                break
        return m.CellTrained(0, 0)

    cell_train = idle  # type: ignore[assignment]


@asynccontextmanager
async def night(client: Client, chosen: m.RunPlan, facts: m.ClusterFacts) -> AsyncIterator[Night]:
    script = Idle(chosen)
    async with script.workers(client):
        for cell in chosen.cells:
            await client.start_workflow(
                "Cell", m.CellInput(chosen, cell.name), id=cell_workflow(chosen.run_id, cell.name),
                task_queue=CONTROL_QUEUE,
            )  # fmt: skip
        handle = await client.start_workflow(
            ElasticScheduler.run, m.SchedulerInput(chosen), id=scheduler_workflow(chosen.run_id),
            task_queue=CONTROL_QUEUE,
        )  # fmt: skip
        found = Night(script, client, handle, facts)
        script.facts = lambda: found.facts
        yield found
        await handle.signal(ElasticScheduler.stop)
        for cell in chosen.cells:
            await client.get_workflow_handle(cell_workflow(chosen.run_id, cell.name)).signal("stop")
        await handle.result()


def cells(*facts: tuple[str, int, int, int], down: str = "") -> list[m.CellFacts]:
    return [m.CellFacts(name, name != down, live, context, kv) for name, live, context, kv in facts]


async def test_measured_rates_decide_whether_a_change_is_worth_it(client: Client) -> None:
    dear = m.ClusterFacts(train_tokens_s=1000.0, to_train_s=20.0, to_rollout_s=30.0)
    async with night(client, plan(min_backlog_tokens=100), dear) as n:
        n.backlog(5)
        seen = await n.looked(STEP)
        assert list(seen.roles.values()) == ["rollout", "rollout"], "half a second of work does not pay for 50 s"
        assert seen.facts == replace(dear, backlog_tokens=500) and seen.switches == 0
        await n.says("a trainer does 1000 tokens/s; a change takes 20.00 s to training, 30.00 s back")
        n.facts = CHEAP
        await n.observe(replace(STEP, ready_tokens=501))
        seen = await n.roles("train", "rollout")
        assert seen.reasons == {"c0": "500 tokens to train; 4 slots hold water level 1"}
        await n.says("c0** (central): train")
        await n.says(seen.reasons["c0"])
        cell = cell_workflow(n.script.plan.run_id, "c0")
        await n.says("last change: drain 0.02 s; 0.02 s in all", cell)
        await n.says(" UTC (500 tokens to train", cell)


async def test_before_anything_is_measured_the_run_file_decides(client: Client) -> None:
    async with night(client, plan(min_backlog_tokens=400), m.ClusterFacts()) as n:
        n.backlog(5)
        await n.observe(STEP)
        await n.roles("train", "rollout")
        await n.says("nothing yet: a trainer for every 400 tokens of backlog")


async def test_time_alone_brings_an_idle_satellite_back(client: Client) -> None:
    """Nobody reports anything: only the oldest rollout grows older."""
    three = [m.PlanCell(f"c{i}", i == 0, 4) for i in range(3)]
    young = replace(CHEAP, to_train_s=0.5, to_rollout_s=0.5, oldest_age_s=1.0)
    async with night(client, plan(cells=three, time_limit_s=10_000), replace(young, oldest_age_s=None)) as n:
        n.backlog(20)  # 2 s of work for one trainer, with nobody to wait for
        await n.observe(STEP)
        await n.roles("train", "train", "rollout")
        n.facts = young
        n.backlog(0)
        seen = await n.looked(replace(STEP, ready_tokens=501))
        assert list(seen.roles.values()) == ["train", "train", "rollout"], "half a second of tail pays for no change"
        n.facts = replace(young, oldest_age_s=900.0)  # time passes, and nobody says a word
        seen = await n.roles("train", "rollout", "rollout")
        assert seen.reasons["c1"] == "nothing to train; 1 rollouts are expected to last 450 s"
        assert (await n.view()).tail_s == 450.0


async def test_steps_that_end_tell_the_pace(client: Client) -> None:
    """Of each, the greatest age at which a rollout of it was seen; an evaluation's end says nothing."""
    async with night(client, plan(), CHEAP) as n:
        n.backlog(0)
        for index, age in ((0, 40.0), (1, 7.0)):
            step = replace(STEP, source=f"step-{index}", order=index)
            n.facts = replace(CHEAP, oldest_age_s=age)
            await n.looked(step)
            await n.looked(replace(step, source=f"eval-v{index}"))
            await n.says("pace: not two steps have ended")
            await n.observe(replace(step, source=f"eval-v{index}", done=True))
            await n.observe(replace(step, done=True))
        await n.says("the longest rollout of the newest ran 7 s")


async def test_the_level_that_was_counted_counts(client: Client) -> None:
    """A step's report is a second old: of nine rollouts that it has running, eight are being scored."""
    async with night(client, plan(), CHEAP) as n:
        n.backlog(5)
        assert list((await n.looked(replace(STEP, running=9))).roles.values()) == ["rollout", "rollout"]
        n.facts = replace(CHEAP, live_rollouts=1)
        await n.observe(replace(STEP, running=9, ready_tokens=501))
        assert (await n.roles("train", "rollout")).water_level == 1


async def test_a_cell_leaves_only_where_the_others_caches_hold_what_is_live(client: Client) -> None:
    def held(context: int) -> m.ClusterFacts:
        return replace(
            CHEAP, context_tokens=context, cells=cells(("c0", 1, context // 2, 800), ("c1", 1, context // 2, 800))
        )

    async with night(client, plan(), held(900)) as n:
        n.backlog(5)
        seen = await n.looked(STEP)
        assert list(seen.roles.values()) == ["rollout", "rollout"], "800 tokens of cache do not hold 900"
        await n.says("contexts of 900 tokens for caches of 1600")
        n.facts = held(500)
        await n.observe(replace(STEP, ready_tokens=501))
        await n.roles("train", "rollout")
        n.facts = held(850)  # they grow, by less than a change is worth
        assert list((await n.looked(replace(STEP, ready_tokens=502))).roles.values()) == ["train", "rollout"]
        n.facts = held(1000)
        n.backlog(0)  # central has nothing to do
        await n.observe(replace(STEP, ready_tokens=503))
        seen = await n.roles("rollout", "rollout")
        assert seen.reasons["c0"] == "contexts of 1000 tokens exceed caches of 800"


async def test_a_dead_cell_has_no_room(client: Client) -> None:
    dead = replace(CHEAP, cells=cells(("c0", 1, 10, 800), ("c1", 0, 0, 800), down="c1"))
    async with night(client, plan(), dead) as n:
        n.backlog(5)
        assert list((await n.looked(STEP)).roles.values()) == ["rollout", "rollout"]
        await n.says("c1**: rollout · 0 rollouts · **does not serve: its engine or agent is down**")
        n.facts = replace(dead, cells=cells(("c0", 1, 10, 800), ("c1", 0, 0, 800)))
        await n.observe(replace(STEP, ready_tokens=501))
        await n.roles("train", "rollout")


async def test_a_cell_that_dies_while_it_changes_costs_time_only(client: Client) -> None:
    """Its agent is killed in the midst of both ways. Until it is back, nobody else leaves in its place."""

    class Dying(Script):
        died = 0

        def _die(self) -> None:
            if self.died < 4 and self.died % 2 == 0:
                self.died += 1
                raise RuntimeError("the agent was killed")
            self.died += 1

        @activity.defn(name="cell_to_train")
        async def dying_to_train(self, x: m.CellSwitch) -> m.CellSwitched:
            self._die()
            return await Script.cell_to_train(self, x)

        @activity.defn(name="cell_to_rollout")
        async def dying_to_rollout(self, x: m.CellSwitch) -> m.CellSwitched:
            if self.roles[x.cell] != "rollout":
                self._die()
            return await Script.cell_to_rollout(self, x)

        cell_to_train = dying_to_train  # type: ignore[assignment]
        cell_to_rollout = dying_to_rollout  # type: ignore[assignment]

    chosen = plan(steps=2)
    straggler = f"{chosen.run_id}/s0/01/01"
    script = Dying(chosen, harness=lambda rollout: 3.0 if rollout == straggler else 0.0)
    async with script.workers(client):
        result = await script.run(client)
    assert (result.state, result.version) == ("done", 2)
    assert script.died > 2 and script.under_served == []
    assert [sum(done.values()) for done in script.trained.values()] == [2, 2]


async def test_continuing_as_new_keeps_all_that_was_decided(impatient: Client) -> None:
    facts = replace(CHEAP, oldest_age_s=8.0, context_tokens=77, cells=cells(("c0", 0, 0, 800), ("c1", 1, 77, 800)))
    async with night(impatient, plan(min_backlog_tokens=100), facts) as n:
        n.backlog(5)
        await n.observe(replace(STEP, queued=2, window=0))
        await n.roles("train", "rollout")
        decided = await n.looked(replace(STEP, queued=2, window=0, ready_tokens=499))  # a cell that changes is left out

        async def continued() -> bool:
            # One signal a look, and a breath: a workflow continues as new only when none came while it decided.
            looks = n.script.looks
            await n.observe(replace(STEP, queued=2, window=0, ready_tokens=500 + looks))
            await until(lambda: n.looks_after(looks))
            await asyncio.sleep(0.2)
            return len([e async for e in impatient.list_workflows(f"WorkflowId = '{n.handle.id}'")]) > 2

        await until(continued)
        assert await n.view() == decided
        await n.says("500 tokens to train; 4 slots hold water level 3")
        assert n.script.happened("train") == ["c0"], "nobody was told twice"
