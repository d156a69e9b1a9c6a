"""TrainingStep: the rollouts of one step, their groups handed out as they settle, one optimizer step."""

from __future__ import annotations

import asyncio

from temporalio import workflow
from temporalio.exceptions import ApplicationError, is_cancelled_exception

from workflows import attributes as a
from workflows import messages as m
from workflows import verbs
from workflows.launch import Launcher
from workflows.names import cell_workflow, run_workflow
from workflows.observe import Observer


@workflow.defn
class TrainingStep:
    """Signals: `window` (launch share), `turn` (older steps are done), `pause`. Tells TrainingRun how it ended."""

    @workflow.init
    def __init__(self, step: m.TrainingStepInput) -> None:
        self._step, self._plan = step, step.plan
        self._turn = step.first
        self._opened: m.OpenedStep | None = None
        self._handed: dict[int, m.HandedOut] = {}  # what each group has given so far
        self._seen: dict[int, int] = {}  # members of each group that its last hand-out could see
        self._busy: set[int] = set()  # groups that are being handed out
        self._done = False
        enough = step.plan.group_size if step.plan.over_submit else None
        self._launcher = Launcher(step.plan, step.index, step.window, self._member_settled, self._changed, enough)
        self._launcher.paused = step.paused
        self._observer = Observer(step.plan.run_id, self._observation)

    @workflow.signal
    def window(self, rollouts: int) -> None:
        self._launcher.window = max(self._launcher.window, rollouts)

    @workflow.signal
    def turn(self) -> None:
        self._turn = True

    @workflow.signal
    def pause(self, paused: bool) -> None:
        self._launcher.paused = paused

    @workflow.run
    async def run(self, step: m.TrainingStepInput) -> m.StepDone:
        observing = asyncio.create_task(self._observer.run())
        try:
            done = await self._whole()
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError) or is_cancelled_exception(error)
            await self._over(m.StepDone(step.index, -1, None, "cancelled" if cancelled else f"{error}"))
            raise
        finally:
            observing.cancel()
        await self._over(done)
        return done

    async def _whole(self) -> m.StepDone:
        plan, index = self._plan, self._step.index
        self._details("opening")
        self._opened = opened = await verbs.open_step(m.OpenStep(plan.run_id, index))
        await self._launcher.run(opened.groups)
        await verbs.close_step(m.CloseStep(plan.run_id, opened.step_id))
        self._details("closed: waits for the step before" if not self._turn else "optimizer step")
        await workflow.wait_condition(lambda: self._turn)
        self._details("optimizer step")
        finished = await verbs.finish_step(m.FinishStep(plan.run_id, opened.step_id), plan.central)
        workflow.upsert_search_attributes([a.VERSION.value_set(finished.version), a.STATE.value_set("done")])
        cells = [cell_workflow(plan.run_id, cell.name) for cell in plan.cells]
        await asyncio.gather(*(_signal(cell, "new_version", finished.version) for cell in cells))
        self._details(f"done: version {finished.version}")
        return m.StepDone(index, finished.version, self._reward())

    async def _over(self, done: m.StepDone) -> None:
        self._done = True
        await self._observer.report()
        await _signal(run_workflow(self._plan.run_id), "step_done", done)

    async def _member_settled(self, group: m.GroupRef, members: list[m.RolloutResult]) -> None:
        """Hand its group out when that is due: one hand-out at a time, and the next takes all who settled meanwhile."""
        assert self._opened is not None
        if group.group_id in self._busy:
            return
        self._busy.add(group.group_id)
        while self._is_due(group, members):
            self._seen[group.group_id] = len(members)
            self._handed[group.group_id] = await verbs.hand_out_group(
                m.HandOut(self._plan.run_id, self._opened.step_id, group.group_id), group
            )
            self._observer.urgent()
            self._details("rollouts run")
        self._busy.discard(group.group_id)

    def _is_due(self, group: m.GroupRef, members: list[m.RolloutResult]) -> bool:
        """All are settled; or enough of them have rewards, one of which no hand-out has seen."""
        new, quorum = members[self._seen.get(group.group_id, 0) :], self._plan.quorum
        if (handed := self._handed.get(group.group_id)) is not None and handed.closed:
            return False
        if len(members) == len(group.rollouts):
            return bool(new)
        valid = sum(r.reward is not None for r in members)
        return quorum is not None and valid >= quorum and any(r.reward is not None for r in new)

    def _changed(self) -> None:
        self._observer.changed()
        self._details("paused" if self._launcher.paused else "rollouts run")

    def _observation(self) -> m.Observation:
        index, groups = self._step.index, len(self._opened.groups) if self._opened else 0
        return m.Observation(
            source=f"step-{index}",
            order=index,
            queued=self._launcher.queued,
            running=self._launcher.running,
            open_groups=groups - self._closed(),
            ready_tokens=sum(h.tokens for h in self._handed.values()),
            window=self._launcher.window,
            closed=self._opened is not None and self._closed() == groups,
            done=self._done,
        )

    def _closed(self) -> int:
        return sum(h.closed for h in self._handed.values())

    def _reward(self) -> float | None:
        weights = [(h.reward, h.n_valid) for h in self._handed.values() if h.reward is not None and h.n_valid]
        total = sum(n for _, n in weights)
        return sum(r * n for r, n in weights) / total if total else None

    def _details(self, stage: str) -> None:
        launcher, groups = self._launcher, len(self._opened.groups) if self._opened else 0
        reward = self._reward()
        handed = list(self._handed.values())
        outcomes = [f"{sum(h.outcome == o for h in handed)} {o}" for o in dict.fromkeys(h.outcome for h in handed)]
        workflow.set_current_details(
            f"**Step {self._step.index}** · {stage}\n\n"
            f"- rollouts: {launcher.queued} queued, {launcher.running} running, {len(launcher.results)} settled\n"
            f"- groups: {self._closed()} of {groups} handed out ({', '.join(outcomes) or 'none'})\n"
            f"- tokens ready to train: {sum(h.tokens for h in handed)}\n"
            f"- mean reward so far: {'none' if reward is None else f'{reward:.3f}'}"
        )


async def _signal(workflow_id: str, name: str, argument: object) -> None:
    try:
        await workflow.get_external_workflow_handle(workflow_id).signal(name, argument)
    except ApplicationError:
        workflow.logger.warning("%s is over: signal %s has no taker", workflow_id, name)
