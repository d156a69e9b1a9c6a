"""Scripted activities: a whole cluster in memory, under the names that the workflows call.

It stands in for hosts, cells and database where the logic of workflows is tested; the real activities are tested in
tests/activities and in the end-to-end tests.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from workflows import messages as m
from workflows.names import CONTROL_QUEUE, ROLLOUTS_QUEUE, cell_queue, host_queue
from workflows.registry import WORKFLOWS, workflow_runner

HOST = "host-under-test"
LIMIT_S = 300
"""After so long a test hangs. It says nothing about speed: on a crowded machine a run of four steps took a minute."""


def plan(**changes: object) -> m.RunPlan:
    """A small run with an id of its own: two cells, two steps of two groups of two rollouts."""
    base = m.RunPlan(
        run_id=f"t{uuid.uuid4().hex[:10]}",
        steps=2,
        cells=[m.PlanCell("c0", True, 4), m.PlanCell("c1", False, 4)],
        harness="scripted",
        groups_per_step=2,
        group_size=2,
        max_concurrent=8,
        max_staleness=0,
        time_limit_s=30,
        score_time_limit_s=10,
        score_attempts=3,
        policy="elastic",
        train_cells=[],
        min_backlog_tokens=10,
        heldout=False,
        evaluate_every=0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@dataclass
class Script:
    """What happens when. A rollout runs for `harness` seconds, and while it is `held`; `reward` gives its reward.

    Where a machine is so crowded that heartbeats come late, activities are tried again, as they may be anywhere.
    """

    plan: m.RunPlan
    harness: Callable[[str], float] = lambda rollout: 0.0
    held: Callable[[str], bool] = lambda rollout: False
    reward: Callable[[str], float] = lambda rollout: float(rollout[-1]) % 2
    launches: list[int] | None = None  # order of a step's groups; none: by position
    train_s: float = 0.02  # a micro-batch
    switch_s: float = 0.02
    facts: Callable[[], m.ClusterFacts] = m.ClusterFacts  # what was measured; the backlog is the script's own
    poll_s: float = 0.02  # how often a live harness is looked at
    heartbeat_s: float = 0.1  # least time between two heartbeats that reach the server
    log: list[tuple[str, str]] = field(default_factory=list)  # (what, whom), in the order in which it happened
    roles: dict[str, str] = field(default_factory=dict)
    serving: dict[str, int] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)
    settled: dict[str, str] = field(default_factory=dict)  # rollout -> exclude reason or ""
    members: dict[int, list[str]] = field(default_factory=dict)  # of each group of a step
    handed: list[tuple[int, int, bool]] = field(default_factory=list)  # group, rewards and whether all were settled
    peak: int = 0  # most rollouts at once
    backlog: dict[int, int] = field(default_factory=dict)  # step -> micro-batches to do
    trained: dict[int, dict[str, int]] = field(default_factory=dict)  # step -> cell -> micro-batches
    closed: set[int] = field(default_factory=set)
    version: int = 0
    evaluated: list[int] = field(default_factory=list)
    looks: int = 0  # at the cluster
    under_served: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.roles = self.roles or {c.name: "rollout" for c in self.plan.cells}
        self.serving = {c.name: 0 for c in self.plan.cells}

    def happened(self, what: str) -> list[str]:
        return [whom for kind, whom in self.log if kind == what]

    # ---- control ----------------------------------------------------------------------------------------------------

    @activity.defn
    async def open_run(self, x: m.OpenRun) -> m.OpenedRun:
        return m.OpenedRun(8, 2)

    @activity.defn
    async def mark_run(self, x: m.MarkRun) -> None:
        self.log.append(("mark", x.state))

    @activity.defn
    async def end_run(self, x: m.EndRun) -> None:
        self.log.append(("end", x.state))

    @activity.defn
    async def open_step(self, x: m.OpenStep) -> m.OpenedStep:
        self.log.append(("open", str(x.index)))
        self.backlog[x.index] = 0
        self.trained[x.index] = {}
        groups = self._groups(f"s{x.index}", x.index, self.plan.group_size + self.plan.over_submit)
        self.members |= {g.group_id: g.rollouts for g in groups}
        groups = [groups[i] for i in self.launches or range(len(groups))]
        return m.OpenedStep(x.index, max(0, x.index - self.plan.max_staleness), groups)

    def _groups(self, scope: str, base: int, size: int) -> list[m.GroupRef]:
        return [
            m.GroupRef(
                base * 100 + g, g, f"task-{g}", "family",
                [f"{self.plan.run_id}/{scope}/{g:02d}/{i:02d}" for i in range(size)],
            )
            for g in range(self.plan.groups_per_step)
        ]  # fmt: skip

    @activity.defn
    async def hand_out_group(self, x: m.HandOut) -> m.HandedOut:
        members = self.members[x.group_id]
        valid, closed = sum(self.settled.get(r) == "" for r in members), set(members) <= self.settled.keys()
        self.log.append(("hand_out", str(x.group_id)))
        self.handed.append((x.group_id, valid, closed))
        self.backlog[x.step_id] += 1
        return m.HandedOut("trained", valid, valid, 1, 100, 50, 0.5, closed)

    @activity.defn
    async def close_step(self, x: m.CloseStep) -> None:
        self.closed.add(x.step_id)

    @activity.defn
    async def open_evaluation(self, x: m.OpenEvaluation) -> m.OpenedEvaluation:
        self.log.append(("evaluate", str(x.version)))
        return m.OpenedEvaluation(x.version, self._groups(f"e{x.version}", x.version, self.plan.group_size))

    @activity.defn
    async def finish_evaluation(self, x: m.FinishEvaluation) -> m.EvaluationResult:
        self.evaluated.append(x.evaluation_id)
        return m.EvaluationResult(x.evaluation_id, 0.5, 0.5, 4)

    @activity.defn
    async def settle(self, x: m.SettleRollout) -> m.RolloutResult:
        self.settled.setdefault(x.rollout_id, x.exclude_reason)
        return m.RolloutResult(x.rollout_id, x.outcome, None, x.exclude_reason, 0)

    @activity.defn
    async def rollout_facts(self, x: m.RolloutFactsRequest) -> m.RolloutFacts:
        return m.RolloutFacts(0, 0)

    @activity.defn
    async def read_cluster(self, x: m.ClusterRequest) -> m.ClusterFacts:
        self.looks += 1
        return replace(self.facts(), backlog_tokens=100 * sum(self.backlog.values()))

    # ---- host -------------------------------------------------------------------------------------------------------

    @activity.defn
    async def prepare(self, x: m.Prepare) -> m.Prepared:
        self.log.append(("prepare", x.rollout_id))
        return m.Prepared(HOST)

    @activity.defn
    async def run_harness(self, x: m.RunHarness) -> m.HarnessEnd:
        self.live.add(x.rollout_id)
        self.peak = max(self.peak, len(self.live))
        until = time.monotonic() + self.harness(x.rollout_id)
        try:
            while self.held(x.rollout_id) or time.monotonic() < until:
                activity.heartbeat()
                if "rollout" not in self.roles.values():
                    self.under_served.append(x.rollout_id)
                await asyncio.sleep(self.poll_s)
        except asyncio.CancelledError:
            self.log.append(("killed", x.rollout_id))
            raise
        finally:
            self.live.discard(x.rollout_id)
        return m.HarnessEnd("completed", 0, 3, 30, 1.0)

    @activity.defn
    async def score(self, x: m.ScoreRollout) -> m.Scored:
        self.settled.setdefault(x.rollout_id, "")
        return m.Scored(x.outcome, self.reward(x.rollout_id), None)

    # ---- cells ------------------------------------------------------------------------------------------------------

    @activity.defn
    async def cell_to_train(self, x: m.CellSwitch) -> m.CellSwitched:
        again = activity.info().attempt > 1
        assert self.roles[x.cell] == "rollout" or again, f"{x.cell} is {self.roles[x.cell]}"
        await self._switch(x.cell, "train")
        return m.CellSwitched("train", self.version, {"drain": self.switch_s})

    @activity.defn
    async def cell_train(self, x: m.CellTrain) -> m.CellTrained:
        done = 0
        while not activity.is_cancelled():
            activity.heartbeat()
            step = next((s for s in sorted(self.backlog) if self.backlog[s] > 0), None)
            try:
                await asyncio.sleep(self.train_s)
            except asyncio.CancelledError:
                break
            if step is not None and self.backlog[step] > 0:
                self.backlog[step] -= 1
                self.trained[step][x.cell] = self.trained[step].get(x.cell, 0) + 1
                done += 1
        return m.CellTrained(done, 100 * done)

    @activity.defn
    async def cell_to_rollout(self, x: m.CellSwitch) -> m.CellSwitched:
        if self.roles[x.cell] == "rollout":  # as a cell begins
            return m.CellSwitched("rollout", self.version)
        again = activity.info().attempt > 1
        assert self.roles[x.cell] == "train" or again, f"{x.cell} is {self.roles[x.cell]}"
        await self._switch(x.cell, "rollout")
        self.serving[x.cell] = self.version
        return m.CellSwitched("rollout", self.version, {"load": self.switch_s})

    async def _switch(self, cell: str, role: str) -> None:
        if self.roles[cell] == role:
            return
        self.roles[cell] = f"to_{role}"
        await asyncio.sleep(self.switch_s)
        if self.roles[cell] != role:  # else an earlier attempt was still under way
            self.roles[cell] = role
            self.log.append((role, cell))

    @activity.defn
    async def cell_load_weights(self, x: m.CellWeights) -> m.CellServing:
        self.serving[x.cell] = max(self.serving[x.cell], x.version)
        return m.CellServing(self.serving[x.cell])

    @activity.defn
    async def finish_step(self, x: m.FinishStep) -> m.FinishedStep:
        central = self.plan.central
        if x.step_id < self.version and activity.info().attempt > 1:
            return m.FinishedStep(x.step_id + 1, {"loss": 0.1})
        while not (x.step_id in self.closed and self.backlog[x.step_id] == 0 and self.roles[central] == "train"):
            activity.heartbeat()
            await asyncio.sleep(0.02)
        if x.step_id != self.version:
            raise ApplicationError(f"step {x.step_id} out of order at v{self.version}", non_retryable=True)
        self.version += 1
        self.log.append(("finish", str(x.step_id)))
        return m.FinishedStep(self.version, {"loss": 0.1})

    # ---- workers ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def workers(self, client: Client, *, cached: int = 200) -> AsyncIterator[None]:
        """Workers for the control queue, one host, and every cell."""
        throttle = timedelta(seconds=self.heartbeat_s)
        beat = {"max_heartbeat_throttle_interval": throttle, "default_heartbeat_throttle_interval": throttle}
        async with AsyncExitStack() as stack:
            control = [self.open_run, self.mark_run, self.end_run, self.open_step, self.hand_out_group, self.close_step]
            control += [
                self.open_evaluation,
                self.finish_evaluation,
                self.settle,
                self.rollout_facts,
                self.read_cluster,
            ]
            await stack.enter_async_context(
                Worker(
                    client, task_queue=CONTROL_QUEUE, workflows=WORKFLOWS, activities=control,
                    workflow_runner=workflow_runner(),
                    max_cached_workflows=cached,
                )
            )  # fmt: skip
            host = [self.run_harness, self.score]
            await stack.enter_async_context(Worker(client, task_queue=ROLLOUTS_QUEUE, activities=[self.prepare]))
            await stack.enter_async_context(Worker(client, task_queue=host_queue(HOST), activities=host, **beat))
            cell = [self.cell_to_train, self.cell_train, self.cell_to_rollout, self.cell_load_weights, self.finish_step]
            for c in self.plan.cells:
                queue = cell_queue(self.plan.run_id, c.name)
                await stack.enter_async_context(Worker(client, task_queue=queue, activities=cell, **beat))
            yield

    async def run(self, client: Client, within_s: float = LIMIT_S) -> m.RunResult:
        """Start the run and wait for its end."""
        handle = await client.start_workflow(
            "TrainingRun", m.TrainingRunInput(self.plan), id=self.plan.run_id, task_queue=CONTROL_QUEUE,
            result_type=m.RunResult,
        )  # fmt: skip
        return await asyncio.wait_for(handle.result(), within_s)
