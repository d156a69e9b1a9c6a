"""Rollout: one harness run on one task, from workspace to reward."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, TimeoutError, TimeoutType, is_cancelled_exception

from workflows import attributes as a
from workflows import messages as m
from workflows import verbs
from workflows.names import SURPLUS

HARNESS_ATTEMPTS = 3
"""Fresh harness runs of a rollout of which nothing was sampled."""


@workflow.defn
class Rollout:
    """Prepare, run the harness, score; whatever happens, the rollout's row is settled exactly once.

    Signal `surplus`: its group is complete without it, and it will be cancelled for that.
    """

    @workflow.init
    def __init__(self, rollout: m.RolloutInput) -> None:
        self._rollout = rollout
        self._surplus = False

    @workflow.signal
    def surplus(self) -> None:
        self._surplus = True

    @workflow.run
    async def run(self, rollout: m.RolloutInput) -> m.RolloutResult:
        try:
            result = await self._settled()
        except BaseException as error:
            if not (isinstance(error, asyncio.CancelledError) or is_cancelled_exception(error)):
                raise
            if self._surplus:
                await self._exclude(SURPLUS, SURPLUS)
                self._details("ended: its group is complete without it")
            else:
                await self._exclude("infrastructure", "cancelled")
                self._details("cancelled")
            raise
        workflow.upsert_search_attributes(
            [a.STATE.value_set(result.outcome)]
            + ([a.REWARD.value_set(result.reward)] if result.reward is not None else [])
        )
        self._details(f"settled: {result.outcome}, reward {result.reward}, {result.calls} calls")
        return result

    async def _settled(self) -> m.RolloutResult:
        r = self._rollout
        for attempt in range(1, HARNESS_ATTEMPTS + 1):
            self._details("preparing the workspace", attempt)
            try:
                prepared = await verbs.prepare(m.Prepare(r.run_id, r.rollout_id, attempt), r.task)
            except ActivityError as error:
                if is_cancelled_exception(error):
                    raise
                return await self._exclude("infrastructure", "prepare_failed")
            if prepared.settled is not None:
                return prepared.settled
            _heed_cancellation()
            self._details(f"{r.harness} runs on {prepared.host}, limit {r.time_limit_s:g} s", attempt)
            try:
                end = await verbs.run_harness(
                    m.RunHarness(r.run_id, r.rollout_id, attempt, r.time_limit_s), prepared.host, r.harness
                )
            except ActivityError as error:
                if is_cancelled_exception(error):
                    raise
                if not _host_is_lost(error):
                    return await self._exclude("infrastructure", "harness_failed")
                facts = await verbs.rollout_facts(m.RolloutFactsRequest(r.run_id, r.rollout_id))
                if facts.sampled:  # its tree belongs to a workspace that is gone
                    return await self._exclude("infrastructure", "host_lost")
                continue
            _heed_cancellation()
            if end.outcome == "infrastructure" and end.sampled > 0:  # ended by a fall of its host, not by itself
                return await self._exclude("infrastructure", "harness_lost")
            if end.calls > 0:
                return await self._score(prepared.host, attempt, end)
            if end.sampled > 0 or end.outcome == "timeout":
                break
            self._details(f"no model call (exit code {end.exit_code}): again", attempt)
            await workflow.sleep(timedelta(seconds=2**attempt), summary="after a harness that made no model call")
        return await self._exclude("infrastructure", "no_model_call")

    async def _score(self, host: str, attempt: int, end: m.HarnessEnd) -> m.RolloutResult:
        r = self._rollout
        self._details(f"{end.outcome} after {end.seconds:.1f} s and {end.calls} calls: scoring", attempt)
        try:
            scored = await verbs.score(
                m.ScoreRollout(r.run_id, r.rollout_id, attempt, end.outcome, r.score_attempts, r.score_time_limit_s),
                host,
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            return await self._exclude("evaluator", "host_lost" if _host_is_lost(error) else "evaluator")
        return m.RolloutResult(r.rollout_id, scored.outcome, scored.reward, scored.exclude_reason, end.calls)

    async def _exclude(self, outcome: str, reason: str) -> m.RolloutResult:
        r = self._rollout
        return await verbs.settle(m.SettleRollout(r.run_id, r.rollout_id, outcome, reason))

    def _details(self, stage: str, attempt: int = 1) -> None:
        r = self._rollout
        again = f"\n\nfresh run {attempt} of at most {HARNESS_ATTEMPTS}" if attempt > 1 else ""
        since = workflow.now().strftime("%H:%M:%S")
        workflow.set_current_details(f"**{r.rollout_id}** · `{r.task}`\n\n{stage} (since {since} UTC){again}")


def _heed_cancellation() -> None:
    """An activity that ends well although it was cancelled takes the cancellation with it."""
    if workflow.cancellation_reason() is not None:
        raise asyncio.CancelledError


def _host_is_lost(error: ActivityError) -> bool:
    return isinstance(error.cause, TimeoutError) and error.cause.type == TimeoutType.SCHEDULE_TO_START
