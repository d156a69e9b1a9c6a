"""Launching the rollouts of groups within a window, whole groups first. Shared by TrainingStep and Evaluation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine

from temporalio import workflow
from temporalio.exceptions import ApplicationError, ChildWorkflowError, is_cancelled_exception

from workflows import attributes as a
from workflows import messages as m
from workflows import verbs
from workflows.names import SURPLUS

MemberSettled = Callable[[m.GroupRef, list[m.RolloutResult]], Awaitable[None]]


class Launcher:
    """Runs every member of `groups` as a Rollout child, at most `window` at once, in the order of the groups.

    `settled` is awaited whenever a member is settled, with the results of its group so far (a list that grows);
    `changed` is called whenever a rollout starts or settles. `enough`: rewards that complete a group; its members that
    wait or run then are ended, and excluded as surplus.
    """

    def __init__(
        self,
        plan: m.RunPlan,
        step: int | None,
        window: int,
        settled: MemberSettled,
        changed: Callable[[], None],
        enough: int | None = None,
    ) -> None:
        self.window = window
        self.paused = False
        self.running = 0
        self.results: list[m.RolloutResult] = []
        self._plan, self._step = plan, step
        self._settled, self._changed, self._enough = settled, changed, enough
        self._queue: deque[tuple[m.GroupRef, str]] = deque()
        self._members: dict[int, list[m.RolloutResult]] = {}
        self._begun: set[str] = set()  # rollouts that the server knows
        self._surplus: set[str] = set()
        self._tasks: dict[asyncio.Task[None], None] = {}  # a set has no order, and a replay cancels as before
        self._error: BaseException | None = None

    @property
    def queued(self) -> int:
        """Rollouts that wait for their launch."""
        return len(self._queue)

    async def run(self, groups: list[m.GroupRef]) -> None:
        """Returns when every member is settled and `settled` has returned for it."""
        self._queue.extend((group, rollout) for group in groups for rollout in group.rollouts)
        try:
            while self._queue or self._tasks:
                while self._queue and not self.paused and self.running < self.window:
                    self._launch(*self._queue.popleft())
                self._changed()
                await workflow.wait_condition(self._may_go_on)
                if self._error is not None:
                    raise self._error
        except BaseException:
            await self._cancel()
            raise

    def _may_go_on(self) -> bool:
        may_launch = bool(self._queue) and not self.paused and self.running < self.window
        return self._error is not None or may_launch or not (self._queue or self._tasks)

    def _launch(self, group: m.GroupRef, rollout: str) -> None:
        self.running += 1
        self._begin(self._one(group, rollout))

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None and self._error is None:
            self._error = task.exception()

    async def _one(self, group: m.GroupRef, rollout: str) -> None:
        try:
            result = await self._child(group, rollout)
        finally:
            self.running -= 1
        await self._note(group, result)

    async def _note(self, group: m.GroupRef, result: m.RolloutResult) -> None:
        self.results.append(result)
        members = self._members.setdefault(group.group_id, [])
        members.append(result)
        if self._enough is not None and sum(r.reward is not None for r in members) == self._enough:
            self._end_surplus(group, {r.rollout_id for r in members})
        self._changed()
        await self._settled(group, members)

    def _end_surplus(self, group: m.GroupRef, settled: set[str]) -> None:
        surplus = [rollout for rollout in group.rollouts if rollout not in settled | self._surplus]
        waiting = {rollout for _, rollout in self._queue}
        self._surplus.update(surplus)
        self._queue = deque(entry for entry in self._queue if entry[1] not in self._surplus)
        for rollout in surplus:
            self._begin(self._never(group, rollout) if rollout in waiting else self._end(rollout))

    async def _never(self, group: m.GroupRef, rollout: str) -> None:
        """A rollout that is surplus before its launch."""
        settle = m.SettleRollout(self._plan.run_id, rollout, SURPLUS, SURPLUS)
        await self._note(group, await verbs.settle(settle))

    async def _end(self, rollout: str) -> None:
        """End one that runs. What was scored a moment before keeps its reward, and is a member like any other."""
        await workflow.wait_condition(lambda: rollout in self._begun)
        try:
            child = workflow.get_external_workflow_handle(rollout)
            await child.signal("surplus")  # before it, for a cancellation cannot say why
            await child.cancel()
        except ApplicationError:
            workflow.logger.info("%s is over already", rollout)

    async def _child(self, group: m.GroupRef, rollout: str) -> m.RolloutResult:
        plan = self._plan
        where = f"step {self._step}" if self._step is not None else "evaluation"
        try:
            child = await workflow.start_child_workflow(
                "Rollout",
                m.RolloutInput(
                    plan.run_id,
                    rollout,
                    group.task,
                    group.family,
                    plan.harness,
                    self._step,
                    plan.time_limit_s,
                    plan.score_time_limit_s,
                    plan.score_attempts,
                ),
                id=rollout,
                result_type=m.RolloutResult,
                parent_close_policy=workflow.ParentClosePolicy.REQUEST_CANCEL,
                search_attributes=a.attributes(
                    (a.RUN, plan.run_id),
                    (a.STEP, self._step),
                    (a.TASK, group.task),
                    (a.FAMILY, group.family or None),
                    (a.HARNESS, plan.harness),
                    (a.STATE, "running"),
                ),
                static_summary=f"{group.task} · {where}",
                static_details=f"Member of group {group.position} of {where}: `{plan.harness}` on `{group.task}`.",
            )
            self._begun.add(rollout)
            result: m.RolloutResult = await child
            return result
        except ChildWorkflowError as error:
            if asyncio.current_task() is not None and asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            # One rollout was cancelled by an operator or has a fault of its own: the others go on without it.
            cancelled = is_cancelled_exception(error)
            outcome, reason = "infrastructure", "cancelled" if cancelled else "workflow_failed"
            if cancelled and rollout in self._surplus:
                outcome = reason = SURPLUS
            return await verbs.settle(m.SettleRollout(plan.run_id, rollout, outcome, reason))

    async def _cancel(self) -> None:
        self._queue.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
