"""Groups that are handed out before their last member is settled, and members that a group does without."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from sqlalchemy import Engine, select, text
from temporalio import activity
from temporalio.client import Client

from gyre.harness import process
from gyre.store.db import transaction
from gyre.store.models import Group, Rollout, Step
from tests.workflows.ledger_cell import LedgerCell
from tests.workflows.real import RealRun
from tests.workflows.script import LIMIT_S, Script, plan
from tests.workflows.server import TemporalServer
from tests.workflows.test_training_run import start, until
from workflows import messages as m
from workflows.names import CONTROL_QUEUE
from workflows.run import TrainingRun


class SlowWorkspaces(Script):
    """Members after the second are prepared for as long as `preparing` says."""

    preparing: asyncio.Event

    @activity.defn
    async def prepare(self, x: m.Prepare) -> m.Prepared:
        if x.rollout_id[-2:] > "01":
            await self.preparing.wait()
        return await Script.prepare(self, x)


class LostAnswer(Script):
    """Its first hand-out is committed, and the answer is lost."""

    @activity.defn
    async def hand_out_group(self, x: m.HandOut) -> m.HandedOut:
        done = await Script.hand_out_group(self, x)
        if len(self.handed) == 1:
            raise RuntimeError("the answer was lost")
        return done


def ids(plan: m.RunPlan, group: int, members: int) -> list[str]:
    return [f"{plan.run_id}/s0/{group:02d}/{i:02d}" for i in range(members)]


async def test_a_quorum_trains_and_the_rest_follows(client: Client) -> None:
    chosen = plan(steps=1, groups_per_step=1, group_size=4, quorum=2, min_backlog_tokens=100)
    slow = ids(chosen, 0, 4)[2:]
    script = Script(chosen, lambda r: 60.0 if r in slow else 0.0)
    async with script.workers(client):
        handle = await start(client, script)
        await until(lambda: sum(script.trained.get(0, {}).values()) > 0 and script.live == set(slow))
        assert script.handed[-1][1:] == (2, False) and 0 not in script.closed
        await client.get_workflow_handle(slow[0]).cancel()  # excluded: no reward, so nothing to hand out
        await until(lambda: slow[0] in script.settled)
        assert (await handle.execute_update(TrainingRun.pause)).state == "paused"
        await client.get_workflow_handle(slow[1]).cancel()
        assert (await handle.execute_update(TrainingRun.resume)).state == "running"
        assert (await asyncio.wait_for(handle.result(), LIMIT_S)).state == "done"
    assert script.handed[-1][1:] == (2, True)
    assert [s for s in script.handed if s[2]] == [script.handed[-1]]  # it is closed once, when all are settled


async def test_stragglers_are_handed_out_as_they_settle(client: Client) -> None:
    chosen = plan(steps=1, groups_per_step=2, group_size=3, quorum=2)
    script = Script(chosen, lambda r: {"00/02": 1.2, "01/01": 0.6, "01/02": 1.8}.get(r[-5:], 0.0))
    async with script.workers(client):
        assert (await script.run(client)).state == "done"
    for group in (0, 1):
        seen = [(valid, closed) for g, valid, closed in script.handed if g == group]
        assert seen == sorted(seen) and seen[0][0] >= 2 and seen[-1] == (3, True)
        assert len(seen) == len(set(seen)) <= 2  # none without something new


async def test_a_hand_out_that_fails_is_done_again(client: Client) -> None:
    chosen = plan(steps=1, groups_per_step=1, group_size=3, quorum=2)
    script = LostAnswer(chosen, lambda r: 0.5 if r.endswith("2") else 0.0)
    async with script.workers(client):
        assert (await script.run(client)).state == "done"
    assert script.handed[-1] == (0, 3, True)


@pytest.mark.parametrize("window", [8, 2])
async def test_surplus_members_are_ended(client: Client, window: int) -> None:
    """With a window of two, the last one is never launched."""
    chosen = plan(steps=1, groups_per_step=1, group_size=2, over_submit=2, quorum=2, max_concurrent=window)
    _, last, *slow = ids(chosen, 0, 4)
    runs = set(slow[: window - 1])
    # Who completes the group ends when those that are surplus then run.
    script = Script(chosen, lambda r: 600.0 if r in slow else 0.0, held=lambda r: r == last and not runs <= script.live)
    async with script.workers(client):
        assert (await script.run(client)).state == "done"
    assert script.settled == {r: "surplus" if r in slow else "" for r in ids(chosen, 0, 4)}
    assert set(script.happened("killed")) == runs
    assert set(script.happened("prepare")) == {*ids(chosen, 0, 2), *runs}
    assert script.handed[-1] == (0, 2, True)


async def test_a_member_that_is_surplus_while_it_is_prepared_never_runs(client: Client) -> None:
    chosen = plan(steps=1, groups_per_step=1, group_size=2, over_submit=1, quorum=2)
    spare = ids(chosen, 0, 3)[2]
    script = SlowWorkspaces(chosen, lambda r: 600.0 if r == spare else 0.0)
    script.preparing = asyncio.Event()

    async def is_cancelled() -> bool:
        events = [e async for e in client.get_workflow_handle(spare).fetch_history_events()]
        return any(e.HasField("workflow_execution_cancel_requested_event_attributes") for e in events)

    async with script.workers(client):
        handle = await start(client, script)
        await until(lambda: len(script.settled) == 2)
        while not await is_cancelled():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        script.preparing.set()
        assert (await asyncio.wait_for(handle.result(), LIMIT_S)).state == "done"
    assert script.settled[spare] == "surplus" and script.happened("killed") == []


async def test_a_real_group_of_four_with_one_to_spare(
    client: Client, engine: Engine, database: str, temporal: TemporalServer, tmp_path: Path
) -> None:
    """Five are launched of four; two make the quorum, two follow, the fifth is ended: its harness, too."""
    waits = f'until [ -f "{tmp_path}/go.{{api_key}}" ]; do sleep 0.05; done'
    run = RealRun(
        engine, database, temporal.address, tmp_path, waits, name=f"q{os.urandom(4).hex()}", rows=False,
        time_limit_s=LIMIT_S, rollouts={"quorum": 2, "over_submit": 1},
    )  # fmt: skip
    rewards = (0.0, 1.0, 1.0, 1.0)

    def rollouts() -> list[Rollout]:
        with transaction(engine) as s:
            return list(s.scalars(select(Rollout).where(Rollout.run_id == run.run_id).order_by(Rollout.member)))

    def handed() -> list[int]:
        return [r.member for r in rollouts() if r.handed_out_at is not None]

    async with run.workers(client), LedgerCell(engine).worker(client, run.run_id):
        handle = await client.start_workflow(
            "TrainingRun", m.TrainingRunInput(m.plan_of(run.config)), id=run.run_id, task_queue=CONTROL_QUEUE,
            result_type=m.RunResult,
        )  # fmt: skip
        await until(lambda: len([r for r in rollouts() if r.state == "running"]) == 5)
        members = rollouts()
        run.calls(*[r.id for r in members])
        for member, reward in zip(members, rewards, strict=False):
            run.evaluator(member.id, fails=0, reward=reward)
        for i in range(4):
            (tmp_path / f"go.{members[i].token}").touch()
            if i:
                await until(lambda i=i: handed() == list(range(i + 1)))  # type: ignore[misc]
        result = await asyncio.wait_for(handle.result(), LIMIT_S)
    assert result.state == "done"
    *four, surplus = rollouts()
    assert (surplus.state, surplus.outcome, surplus.exclude_reason) == ("settled", "surplus", "surplus")
    assert surplus.reward is None and surplus.advantage is None
    folder = run.settings.data / "rollouts" / surplus.id
    assert not isinstance(process.status(folder), process.Running)
    means = [0.5, 0.5, 2 / 3, 0.75]
    assert [r.baseline for r in four] == pytest.approx(means)
    stds = [(p * (1 - p)) ** 0.5 for p in means]
    expected = [(r - p) / (d + 1e-6) for r, p, d in zip(rewards, means, stds, strict=True)]
    assert [r.advantage for r in four] == pytest.approx(expected)
    with transaction(engine) as s:
        step = s.scalars(select(Step).where(Step.run_id == run.run_id)).one()
        assert (step.state, step.n_valid) == ("done", 4)
        group = s.scalars(select(Group).where(Group.step_id == step.id)).one()
        assert (group.outcome, group.baseline) == ("trained", 0.75)
        fates = s.execute(text("SELECT fate, sum(tokens) FROM token_accounting WHERE step IS NOT NULL GROUP BY 1"))
        assert dict(fates.all()) == {"trained": 8, "surplus": 2}
        shown = s.execute(text("SELECT excluded, surplus, valid FROM step_summary")).one()
        assert tuple(shown) == (0, 1, 4)
