"""ElasticScheduler: from what steps and cells report to the cells' roles, by the run's policy."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ApplicationError

from gyre.scheduling import ClusterView, Decision, Demand, StepEnd, make_policy, next_look_s, pace_of, share_window
from gyre.scheduling.pace import KEPT
from workflows import attributes as a
from workflows import messages as m
from workflows import verbs
from workflows.cluster import cluster_view, describe
from workflows.names import cell_workflow


@workflow.defn
class ElasticScheduler:
    """Signals: `observe` (a source's whole state), `cell_changed`, `stop`. Query: `view`."""

    @workflow.init
    def __init__(self, start: m.SchedulerInput) -> None:
        self._plan = plan = start.plan
        self._policy = make_policy(
            plan.policy, train_cells=plan.train_cells, min_backlog_tokens=plan.min_backlog_tokens
        )
        self._sources = {o.source: o for o in start.sources}
        self._phases = {c.name: start.roles.get(c.name, "rollout") for c in plan.cells}
        self._told = {c.name: start.told.get(c.name, "rollout") for c in plan.cells}
        self._reasons = dict(start.reasons)
        self._facts = start.facts
        self._switches = start.switches
        self._ends = list(start.ends)
        self._longest_s = start.longest_s
        self._level: int | None = None
        self._clock: asyncio.Task[None] | None = None
        self._due = 0.0
        self._changed = True
        self._stopped = False

    @workflow.signal
    def observe(self, observation: m.Observation) -> None:
        if observation.done:
            if self._sources.pop(observation.source, None) is not None and observation.source.startswith("step-"):
                self._ends = [*self._ends, StepEnd(workflow.time(), self._longest_s)][-KEPT:]
                self._longest_s = 0.0
        else:
            known = self._sources.get(observation.source)
            window = max(observation.window, known.window if known else 0)  # it may not have heard of its share yet
            self._sources[observation.source] = replace(observation, window=window)
        self._changed = True

    @workflow.signal
    def cell_changed(self, change: m.CellChanged) -> None:
        self._phases[change.cell] = change.role
        self._changed = True

    @workflow.signal
    def stop(self) -> None:
        self._stopped = True

    @workflow.query
    def view(self) -> m.SchedulerView:
        view = self._view()
        roles: dict[str, str] = {c.name: c.role for c in view.cells}
        return m.SchedulerView(view.water_level, roles, dict(self._reasons), self._switches, view.tail_s, self._facts)

    @workflow.run
    async def run(self, start: m.SchedulerInput) -> None:
        self._say(self._view())  # what an earlier run of it knew, until the first look
        while not self._stopped:
            await workflow.wait_condition(lambda: self._changed or self._stopped)
            self._changed = False
            if self._stopped:
                break
            await self._decide()
            told = self._changed or self._stopped  # while it decided: what goes on would not know of a stop
            if not told and workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new(
                    m.SchedulerInput(
                        self._plan, list(self._sources.values()), self._phases, self._told, self._reasons, self._facts,
                        self._switches, self._ends, self._longest_s,
                    )
                )  # fmt: skip

    async def _decide(self) -> None:
        if self._sources:
            before, ends = dict(self._phases), self._ends
            facts = await verbs.read_cluster(m.ClusterRequest(self._plan.run_id))
            # A cell that changed meanwhile is not as it was measured; it would count as one that is down.
            steady = [c for c in facts.cells if self._phases.get(c.name) == before.get(c.name)]
            self._facts = replace(facts, cells=steady)
            if self._ends is ends:  # else it may be of a rollout of the step that has ended meanwhile
                self._longest_s = max(self._longest_s, facts.oldest_age_s or 0.0)
        view = self._view()
        await asyncio.gather(
            *(
                self._tell(cell, decision)
                for cell, decision in self._policy.decide(view).items()
                if decision.role != self._told[cell]
            )
        )
        await self._share_window()
        view = self._view()
        self._look_again(view)
        self._show(view)

    async def _tell(self, cell: str, decision: Decision) -> None:
        before, self._told[cell] = self._told[cell], decision.role
        role = m.SetRole(decision.role, decision.reason)
        if await _signal(cell_workflow(self._plan.run_id, cell), "set_role", role):
            self._switches += 1
            self._reasons[cell] = decision.reason
        else:
            self._told[cell] = before  # the next decision tells it again

    def _look_again(self, view: ClusterView) -> None:
        """Have one clock run while a decision depends on time; one that runs goes on unless it is much too slow."""
        after = next_look_s(view)
        running = self._clock is not None and not self._clock.done()
        if after is None or (running and self._due <= workflow.time() + 2 * after):
            return
        if self._clock is not None:
            self._clock.cancel()
        self._due = workflow.time() + after
        self._clock = asyncio.create_task(self._wake(after))

    async def _wake(self, after: float) -> None:
        await workflow.sleep(timedelta(seconds=round(after, 1)), summary="look again: time passes")
        self._changed = True

    async def _share_window(self) -> None:
        demands = [Demand(o.source, o.order, o.queued, o.running, o.window) for o in self._sources.values()]
        for source, share in share_window(self._plan.max_concurrent, demands).items():
            known = self._sources.get(source)  # it may have ended while another was told
            if known is not None and known.queued and share > known.window:
                self._sources[source] = replace(known, window=share)
                await _signal(f"{self._plan.run_id}/{source}", "window", share)

    def _view(self) -> ClusterView:
        view = cluster_view(self._plan, self._sources.values(), self._phases, self._told, self._facts)
        return replace(view, pace=pace_of(self._ends))

    def _show(self, view: ClusterView) -> None:
        if view.water_level != self._level:
            self._level = view.water_level
            workflow.upsert_search_attributes([a.WATER_LEVEL.value_set(view.water_level)])
        self._say(view)

    def _say(self, view: ClusterView) -> None:
        workflow.set_current_details(describe(view, self._plan, self._reasons, self._switches, next_look_s(view)))


async def _signal(workflow_id: str, name: str, argument: object) -> bool:
    """Whether somebody took it."""
    try:
        await workflow.get_external_workflow_handle(workflow_id).signal(name, argument)
    except ApplicationError:
        workflow.logger.warning("%s is over: signal %s has no taker", workflow_id, name)
        return False
    return True
