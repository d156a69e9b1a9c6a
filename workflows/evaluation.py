"""Evaluation: held-out tasks at one policy version."""

from __future__ import annotations

import asyncio

from temporalio import workflow

from workflows import attributes as a
from workflows import messages as m
from workflows import verbs
from workflows.launch import Launcher
from workflows.observe import Observer


@workflow.defn
class Evaluation:
    """Runs when no step is open, so that every call is answered by the version that is measured."""

    @workflow.init
    def __init__(self, evaluation: m.EvaluationInput) -> None:
        self._evaluation = evaluation
        self._done = False
        self._launcher = Launcher(
            evaluation.plan, None, evaluation.plan.max_concurrent, self._member_settled, self._changed
        )
        self._observer = Observer(evaluation.plan.run_id, self._observation)

    @workflow.signal
    def window(self, rollouts: int) -> None:
        self._launcher.window = max(self._launcher.window, rollouts)

    @workflow.signal
    def pause(self, paused: bool) -> None:
        self._launcher.paused = paused

    @workflow.run
    async def run(self, evaluation: m.EvaluationInput) -> m.EvaluationResult:
        run_id = evaluation.plan.run_id
        observing = asyncio.create_task(self._observer.run())
        try:
            opened = await verbs.open_evaluation(m.OpenEvaluation(run_id, evaluation.version))
            await self._launcher.run(opened.groups)
            result = await verbs.finish_evaluation(m.FinishEvaluation(run_id, opened.evaluation_id))
        finally:
            observing.cancel()
            self._done = True
            await self._observer.report()
        if result.mean_reward is not None:
            workflow.upsert_search_attributes([a.REWARD.value_set(result.mean_reward), a.STATE.value_set("done")])
        workflow.set_current_details(
            f"**v{result.version}**: success {_share(result.success)}, mean reward {_share(result.mean_reward)} "
            f"over {result.n_valid} valid rollouts"
        )
        return result

    async def _member_settled(self, _: m.GroupRef, __: list[m.RolloutResult]) -> None:
        self._changed()

    def _changed(self) -> None:
        launcher = self._launcher
        self._observer.changed()
        workflow.set_current_details(
            f"**v{self._evaluation.version}**: {launcher.queued} queued, {launcher.running} running, "
            f"{len(launcher.results)} settled"
        )

    def _observation(self) -> m.Observation:
        return m.Observation(
            source=f"eval-v{self._evaluation.version}",
            order=self._evaluation.version,
            queued=self._launcher.queued,
            running=self._launcher.running,
            open_groups=0,
            ready_tokens=0,
            window=self._launcher.window,
            done=self._done,
        )


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
