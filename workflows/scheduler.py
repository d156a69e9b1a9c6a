"""ElasticScheduler: from what steps and cells report to the cells' roles, by the run's policy."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from temporalio import workflow
from temporalio.exceptions import ApplicationError

from gyre.scheduling import CellView, ClusterView, Demand, Phase, make_policy, share_window
from workflows import attributes as a
from workflows import messages as m
from workflows import verbs
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
        self._switches = start.switches
        self._backlog = 0
        self._changed = True
        self._stopped = False

    @workflow.signal
    def observe(self, observation: m.Observation) -> None:
        if observation.done:
            self._sources.pop(observation.source, None)
        else:
            self._sources[observation.source] = observation
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
        return m.SchedulerView(
            view.water_level, view.backlog_tokens, {c.name: c.role for c in view.cells}, self._switches
        )

    @workflow.run
    async def run(self, start: m.SchedulerInput) -> None:
        while not self._stopped:
            await workflow.wait_condition(lambda: self._changed or self._stopped)
            self._changed = False
            if self._stopped:
                break
            await self._decide()
            if not self._changed and workflow.info().is_continue_as_new_suggested():
                sources = list(self._sources.values())
                workflow.continue_as_new(
                    m.SchedulerInput(self._plan, sources, self._phases, self._told, self._switches)
                )

    async def _decide(self) -> None:
        if any(o.ready_tokens for o in self._sources.values()):
            self._backlog = (await verbs.read_backlog(m.BacklogRequest(self._plan.run_id))).tokens
        else:
            self._backlog = 0
        view = self._view()
        for cell, decision in self._policy.decide(view).items():
            if decision.role != self._told[cell]:
                before, self._told[cell] = self._told[cell], decision.role
                role = m.SetRole(decision.role, decision.reason)
                if await _signal(cell_workflow(self._plan.run_id, cell), "set_role", role):
                    self._switches += 1
                else:
                    self._told[cell] = before  # the next decision tells it again
        await self._share_window()
        self._show(view)

    async def _share_window(self) -> None:
        demands = [Demand(o.source, o.order, o.queued, o.running) for o in self._sources.values()]
        for source, share in share_window(self._plan.max_concurrent, demands).items():
            known = self._sources.get(source)  # it may have ended while another was told
            if known is not None and known.queued and share > known.window:
                self._sources[source] = replace(known, window=share)
                await _signal(f"{self._plan.run_id}/{source}", "window", share)

    def _view(self) -> ClusterView:
        sources = self._sources.values()
        steps = [o for o in sources if o.source.startswith("step-")]
        return ClusterView(
            cells=tuple(CellView(c.name, c.central, self._phase(c.name), c.max_running) for c in self._plan.cells),
            water_level=sum(o.queued + o.running for o in sources),
            backlog_tokens=self._backlog,
            open_groups=sum(o.open_groups for o in steps),
            steps_open=len(steps),
            steps_closed=sum(o.closed for o in steps),
        )

    def _phase(self, cell: str) -> Phase:
        """A cell that was told to change is on its way, even before it says so."""
        phase, told = self._phases[cell], self._told[cell]
        return cast(Phase, phase if phase == told else f"to_{told}")

    def _show(self, view: ClusterView) -> None:
        workflow.upsert_search_attributes([a.WATER_LEVEL.value_set(view.water_level)])
        cells = "\n".join(f"- {c.name}{' (central)' if c.central else ''}: {c.role}" for c in view.cells)
        workflow.set_current_details(
            f"policy **{self._plan.policy}** · water level {view.water_level} · backlog {view.backlog_tokens} tokens"
            f" · {view.open_groups} groups open · {view.steps_closed} of {view.steps_open} steps closed"
            f" · {self._switches} role changes asked\n\n{cells}"
        )


async def _signal(workflow_id: str, name: str, argument: object) -> bool:
    """Whether somebody took it."""
    try:
        await workflow.get_external_workflow_handle(workflow_id).signal(name, argument)
    except ApplicationError:
        workflow.logger.warning("%s is over: signal %s has no taker", workflow_id, name)
        return False
    return True
