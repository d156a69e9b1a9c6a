"""TrainingRun: steps one after the other (or overlapping, within the staleness), evaluations between them."""

from __future__ import annotations

import asyncio

from temporalio import workflow
from temporalio.common import TypedSearchAttributes
from temporalio.exceptions import ApplicationError, ChildWorkflowError, WorkflowAlreadyStartedError

from workflows import attributes as a
from workflows import messages as m
from workflows import names, verbs


@workflow.defn
class TrainingRun:
    """Updates: `pause`, `resume`, `stop`. Query: `status`. Signal: `step_done`, from its steps.

    Steps, cells and the scheduler outlive one execution of this workflow: they are abandoned children with ids made
    from the run's, and speak by signals, so that continue-as-new may come while steps are open.
    """

    @workflow.init
    def __init__(self, start: m.TrainingRunInput) -> None:
        self._plan = start.plan
        self._state = start.state or m.RunState()
        self._fresh = start.state is None
        self._stage = "running"
        self._woken = True
        self._telling = asyncio.Lock()
        """Held while the steps or the database are told of a pause, its end or the run's: the last word comes last. And
        while a step or an evaluation starts: what was told before it is there would be lost on it."""

    # ---- what others may ask ------------------------------------------------------------------------------------

    @workflow.signal
    def step_done(self, done: m.StepDone) -> None:
        state = self._state
        if done.index not in state.open_steps:
            return
        state.open_steps.remove(done.index)
        self._woken = True
        if done.failure:
            if not state.stopping:
                state.failure = f"step {done.index}: {done.failure}"
                state.stopping = "now"
            return
        state.version = max(state.version, done.version)
        state.steps_done += 1
        state.reward = done.reward if done.reward is not None else state.reward

    @workflow.update
    async def pause(self) -> m.RunStatus:
        """No new step and no new rollout; live rollouts end normally."""
        await self._set_paused(True)
        return self.status()

    @pause.validator
    def _may_pause(self) -> None:
        if self._state.paused:
            raise ValueError("the run is paused already; `resume` it")
        self._must_go_on("pause")

    @workflow.update
    async def resume(self) -> m.RunStatus:
        await self._set_paused(False)
        return self.status()

    @resume.validator
    def _may_resume(self) -> None:
        if not self._state.paused:
            raise ValueError("the run is not paused")
        self._must_go_on("resume")

    @workflow.update
    async def stop(self, how: m.StopRun) -> m.RunStatus:
        """End the run: at once, or when its open steps have ended."""
        self._state.stopping = "wait" if how.wait else "now"
        self._woken = True
        return self.status()

    @stop.validator
    def _may_stop(self, how: m.StopRun) -> None:
        if self._state.stopping == "now" or (self._state.stopping and how.wait):
            raise ValueError("the run is stopping already")
        if how.wait and self._state.paused:
            raise ValueError("the run is paused, so what is open would not end; `resume` it first, or stop it at once")
        if self._stage in ("done", "stopped", "failed"):
            raise ValueError(f"the run is {self._stage}")

    @workflow.query
    def status(self) -> m.RunStatus:
        s = self._state
        stage = self._stage
        if stage in ("running", "evaluating") and (s.stopping or s.paused):
            stage = "stopping" if s.stopping else "paused"
        return m.RunStatus(
            self._plan.run_id, stage, self._plan.steps, s.steps_done, list(s.open_steps), s.version,
            list(s.evaluated), s.reward,
        )  # fmt: skip

    # ---- the run ------------------------------------------------------------------------------------------------

    @workflow.run
    async def run(self, start: m.TrainingRunInput) -> m.RunResult:
        if self._fresh:
            await self._begin()
        try:
            await self._go_on()
        except asyncio.CancelledError:  # somebody pressed Cancel: the same as `stop`, so that nothing is left behind
            self._state.stopping = "now"
            await self._go_on()
        return await self._end()

    async def _go_on(self) -> None:
        while not self._is_over():
            self._woken = False
            self._show()
            if await self._advance():
                continue
            await workflow.wait_condition(lambda: self._woken)
            if workflow.info().is_continue_as_new_suggested():
                await workflow.wait_condition(workflow.all_handlers_finished)
                workflow.continue_as_new(m.TrainingRunInput(self._plan, self._state))

    async def _begin(self) -> None:
        plan, state = self._plan, self._state
        opened = await verbs.open_run(m.OpenRun(plan.run_id))
        state.next_step = state.steps_done = opened.steps_done
        state.version, state.evaluated = opened.version, list(opened.evaluated)
        for cell in plan.cells:
            await self._start_abandoned(
                "Cell",
                m.CellInput(plan, cell.name, version=state.version),
                names.cell_workflow(plan.run_id, cell.name),
                f"cell {cell.name}{' (central)' if cell.central else ''}",
                a.attributes((a.RUN, plan.run_id), (a.CELL, cell.name), (a.ROLE, "rollout")),
            )  # fmt: skip
        # After the cells, for it may have something to tell them at once.
        await self._start_abandoned(
            "ElasticScheduler", m.SchedulerInput(plan), names.scheduler_workflow(plan.run_id),
            f"scheduling: {plan.policy}", a.attributes((a.RUN, plan.run_id)),
        )  # fmt: skip

    async def _advance(self) -> bool:
        """Do the next thing that may be done now; False: there is none until something changes."""
        plan, state = self._plan, self._state
        if state.stopping == "now":
            for index in state.open_steps:
                await self._cancel_step(index)
            return False
        if state.open_steps and state.turn != state.open_steps[0]:
            state.turn = state.open_steps[0]
            await _signal(names.step_workflow(plan.run_id, state.turn), "turn")
            return True
        if state.stopping or state.paused:
            return False
        if self._evaluation_is_due(state.next_step):
            if state.open_steps:
                return False
            await self._evaluate(state.next_step)
            return True
        if state.next_step < plan.steps and len(state.open_steps) <= plan.max_staleness:
            async with self._telling:
                if not (state.stopping or state.paused):  # meanwhile
                    await self._open_step()
            return True
        return False

    def _is_over(self) -> bool:
        state = self._state
        if state.open_steps:
            return False
        ended = state.next_step >= self._plan.steps and not self._evaluation_is_due(state.next_step)
        return bool(state.stopping) or ended

    def _evaluation_is_due(self, version: int) -> bool:
        """Whether `version` is measured before the step that trains on from it opens."""
        plan = self._plan
        measured = version in (0, plan.steps) or (plan.evaluate_every > 0 and version % plan.evaluate_every == 0)
        return plan.heldout and measured and version not in self._state.evaluated

    async def _open_step(self) -> None:
        plan, state = self._plan, self._state
        index, alone = state.next_step, not state.open_steps
        # While an older step is open the scheduler shares the launch window between the two.
        window = plan.max_concurrent if alone else 0
        state.next_step += 1
        state.open_steps.append(index)
        state.turn = index if alone else state.turn
        if window and plan.max_staleness:
            await self._announce(index, window)
        step = m.TrainingStepInput(plan, index, window, first=alone, paused=state.paused)
        await self._start_abandoned(
            "TrainingStep", step, names.step_workflow(plan.run_id, index),
            f"step {index}: {plan.groups_per_step} tasks x {plan.group_size + plan.over_submit} rollouts",
            a.attributes((a.RUN, plan.run_id), (a.STEP, index), (a.HARNESS, plan.harness), (a.STATE, "open")),
        )  # fmt: skip

    async def _announce(self, index: int, window: int) -> None:
        """The scheduler hears who has the window before it can hear of the next step."""
        plan = self._plan
        rollouts = plan.groups_per_step * (plan.group_size + plan.over_submit)
        source = names.step_workflow(plan.run_id, index).removeprefix(f"{plan.run_id}/")
        has = m.Observation(source, index, rollouts, 0, plan.groups_per_step, 0, window)
        await _signal(names.scheduler_workflow(plan.run_id), "observe", has)

    async def _evaluate(self, version: int) -> None:
        plan = self._plan
        async with self._telling:
            if self._state.stopping or self._state.paused:  # meanwhile
                return
            self._stage = "evaluating"
            self._show()
            child = await workflow.start_child_workflow(
                "Evaluation",
                m.EvaluationInput(plan, version),
                id=names.evaluation_workflow(plan.run_id, version),
                result_type=m.EvaluationResult,
                parent_close_policy=workflow.ParentClosePolicy.REQUEST_CANCEL,
                search_attributes=a.attributes((a.RUN, plan.run_id), (a.VERSION, version), (a.STATE, "open")),
                static_summary=f"held-out tasks at v{version}",
            )
        await workflow.wait_condition(lambda: child.done() or self._state.stopping == "now")
        if not child.done():
            child.cancel()
        try:
            await child
            self._state.evaluated.append(version)
        except (ChildWorkflowError, asyncio.CancelledError) as error:
            if not self._state.stopping:
                self._state.failure, self._state.stopping = f"evaluation of v{version}: {error}", "now"
            if workflow.cancellation_reason() is not None:
                raise
        finally:
            self._stage = "running"

    async def _end(self) -> m.RunResult:
        plan, state = self._plan, self._state
        self._stage = "failed" if state.failure else ("stopped" if state.stopping else "done")
        async with self._telling:
            await verbs.end_run(m.EndRun(plan.run_id, self._stage))
        for workflow_id in (
            names.scheduler_workflow(plan.run_id),
            *(names.cell_workflow(plan.run_id, c.name) for c in plan.cells),
        ):
            await _signal(workflow_id, "stop")
        self._show()
        workflow.upsert_search_attributes([a.STATE.value_set(self._stage), a.VERSION.value_set(state.version)])
        await workflow.wait_condition(workflow.all_handlers_finished)
        if state.failure:
            raise ApplicationError(state.failure, type="RunFailed", non_retryable=True)
        return m.RunResult(plan.run_id, self._stage, state.steps_done, state.version)

    # ---- parts ------------------------------------------------------------------------------------------------------

    async def _set_paused(self, paused: bool) -> None:
        self._state.paused, self._woken = paused, True
        async with self._telling:
            open_now = [names.step_workflow(self._plan.run_id, index) for index in self._state.open_steps]
            if self._stage == "evaluating":
                open_now.append(names.evaluation_workflow(self._plan.run_id, self._state.next_step))
            for workflow_id in open_now:
                await _signal(workflow_id, "pause", paused)
            await verbs.mark_run(m.MarkRun(self._plan.run_id, "paused" if paused else "running"))

    def _must_go_on(self, what: str) -> None:
        if self._state.stopping or self._stage in ("done", "stopped", "failed"):
            raise ValueError(f"the run is {self.status().state}: nothing to {what}")

    async def _cancel_step(self, index: int) -> None:
        try:
            await workflow.get_external_workflow_handle(names.step_workflow(self._plan.run_id, index)).cancel()
        except ApplicationError:
            workflow.logger.warning("step %d is over already", index)

    async def _start_abandoned(
        self, name: str, argument: object, workflow_id: str, summary: str, attributes: TypedSearchAttributes
    ) -> None:
        """A cell that runs already, from an earlier TrainingRun of this run, is told to go on; what else runs, does."""
        while True:
            try:
                await workflow.start_child_workflow(
                    name,
                    argument,
                    id=workflow_id,
                    parent_close_policy=workflow.ParentClosePolicy.ABANDON,
                    search_attributes=attributes,
                    static_summary=summary,
                )
                return
            except WorkflowAlreadyStartedError:
                workflow.logger.warning("%s runs already: an earlier TrainingRun of this run began it", workflow_id)
            if name != "Cell" or await _signal(workflow_id, "go_on"):
                return  # else it has ended meanwhile

    def _show(self) -> None:
        s = self.status()
        reward = "none yet" if s.reward is None else f"{s.reward:.3f}"
        workflow.set_current_details(
            f"**{s.run_id}** · {s.state}\n\n- steps: {s.steps_done} of {s.steps} done, open {s.open_steps}\n"
            f"- policy version {s.version}, evaluated at {s.evaluated}\n- mean reward of the last step: {reward}"
        )


async def _signal(workflow_id: str, name: str, *arguments: object) -> bool:
    """Whether somebody took it."""
    try:
        await workflow.get_external_workflow_handle(workflow_id).signal(name, args=list(arguments))
    except ApplicationError:
        workflow.logger.warning("%s is over: signal %s has no taker", workflow_id, name)
        return False
    return True
