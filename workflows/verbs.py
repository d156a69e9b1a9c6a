"""The activities as workflows call them: queue, time-outs, retries and summary of each in one place.

Activities are called by name, so that a workflow never imports what they need.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy

from workflows import messages as m
from workflows.names import CONTROL_QUEUE, ROLLOUTS_QUEUE, cell_queue, host_queue

T = TypeVar("T")

HOST_LOST_AFTER = timedelta(minutes=5)
"""A host whose queue takes nothing for so long is lost: its rollouts begin anew elsewhere."""
HOST_HEARTBEAT = timedelta(seconds=30)
CELL_HEARTBEAT = timedelta(seconds=30)

WAIT = workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED

BAD_INPUT = ["ConfigError", "TaskError", "ValueError"]
"""Error types that no retry mends."""

_DATABASE = RetryPolicy(
    initial_interval=timedelta(milliseconds=200),
    maximum_interval=timedelta(seconds=5),
    non_retryable_error_types=BAD_INPUT,
)
_FOREVER = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=10))
_PREPARE = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_attempts=8, non_retryable_error_types=BAD_INPUT)
_HARNESS = RetryPolicy(
    initial_interval=timedelta(seconds=1),
    maximum_interval=timedelta(seconds=10),
    maximum_attempts=30,
    non_retryable_error_types=BAD_INPUT,
)
_SCORE = RetryPolicy(
    initial_interval=timedelta(seconds=1),
    maximum_interval=timedelta(seconds=30),
    non_retryable_error_types=BAD_INPUT,
)
"""The evaluator's attempts are counted in the table `scores`; the activity ends by itself after the last one."""


async def _call(
    name: str,
    argument: object,
    result: type[T],
    *,
    queue: str,
    limit: timedelta,
    retry: RetryPolicy,
    summary: str,
    heartbeat: timedelta | None = None,
    lost_after: timedelta | None = None,
) -> T:
    """One activity; `lost_after`: nobody took it for so long. A cancelled one is waited for."""
    found: T = await workflow.execute_activity(
        name,
        argument,
        result_type=result,
        task_queue=queue,
        schedule_to_start_timeout=lost_after,
        start_to_close_timeout=limit,
        heartbeat_timeout=heartbeat,
        retry_policy=retry,
        cancellation_type=WAIT,
        summary=summary,
    )
    return found


async def _database(
    name: str,
    argument: object,
    result: type[T],
    summary: str,
    limit_s: float = 30,
    heartbeat: timedelta | None = None,
) -> T:
    return await _call(
        name, argument, result,
        queue=CONTROL_QUEUE, limit=timedelta(seconds=limit_s), retry=_DATABASE, summary=summary, heartbeat=heartbeat,
    )  # fmt: skip


async def open_run(argument: m.OpenRun) -> m.OpenedRun:
    return await _database("open_run", argument, m.OpenedRun, "check tasks, open the run's row", 120)


async def mark_run(argument: m.MarkRun) -> None:
    await _database("mark_run", argument, type(None), argument.state)


async def end_run(argument: m.EndRun) -> None:
    await _database("end_run", argument, type(None), argument.state)


async def open_step(argument: m.OpenStep) -> m.OpenedStep:
    return await _database("open_step", argument, m.OpenedStep, f"step {argument.index}: groups and rollouts", 60)


async def hand_out_group(argument: m.HandOut, group: m.GroupRef) -> m.HandedOut:
    summary = f"group {group.position} {group.task}: advantages, samples, micro-batches"
    return await _database("hand_out_group", argument, m.HandedOut, summary, 900, HOST_HEARTBEAT)


async def close_step(argument: m.CloseStep) -> None:
    await _database("close_step", argument, type(None), "all groups handed out")


async def open_evaluation(argument: m.OpenEvaluation) -> m.OpenedEvaluation:
    return await _database(
        "open_evaluation", argument, m.OpenedEvaluation, f"held-out tasks at v{argument.version}", 60
    )


async def finish_evaluation(argument: m.FinishEvaluation) -> m.EvaluationResult:
    return await _database("finish_evaluation", argument, m.EvaluationResult, "success over valid rollouts")


async def settle(argument: m.SettleRollout) -> m.RolloutResult:
    return await _database("settle", argument, m.RolloutResult, f"without reward: {argument.exclude_reason}")


async def rollout_facts(argument: m.RolloutFactsRequest) -> m.RolloutFacts:
    return await _database("rollout_facts", argument, m.RolloutFacts, "what was sampled before the host was lost")


async def read_cluster(argument: m.ClusterRequest) -> m.ClusterFacts:
    """A local activity: a few indexed queries, many times a step."""
    found: m.ClusterFacts = await workflow.execute_local_activity(
        "read_cluster",
        argument,
        result_type=m.ClusterFacts,
        start_to_close_timeout=timedelta(seconds=10),
        retry_policy=_DATABASE,
    )
    return found


async def prepare(argument: m.Prepare, task: str) -> m.Prepared:
    return await _call(
        "prepare", argument, m.Prepared,
        queue=ROLLOUTS_QUEUE,
        limit=timedelta(minutes=2),
        retry=_PREPARE,
        summary=f"workspace of {task}" + (f", attempt {argument.attempt}" if argument.attempt > 1 else ""),
    )  # fmt: skip


async def run_harness(argument: m.RunHarness, host: str, harness: str) -> m.HarnessEnd:
    return await _call(
        "run_harness", argument, m.HarnessEnd,
        queue=host_queue(host),
        lost_after=HOST_LOST_AFTER,
        limit=timedelta(seconds=argument.time_limit_s) + timedelta(minutes=10),
        heartbeat=HOST_HEARTBEAT,
        retry=_HARNESS,
        summary=f"{harness} on {host}, limit {argument.time_limit_s:g} s",
    )  # fmt: skip


async def score(argument: m.ScoreRollout, host: str) -> m.Scored:
    return await _call(
        "score", argument, m.Scored,
        queue=host_queue(host),
        lost_after=HOST_LOST_AFTER,
        limit=timedelta(seconds=argument.time_limit_s) + timedelta(minutes=10),  # it may wait for a free grader
        heartbeat=HOST_HEARTBEAT,
        retry=_SCORE,
        summary=f"hidden tests after {argument.outcome}, at most {argument.score_attempts} attempts",
    )  # fmt: skip


async def cell_to_train(argument: m.CellSwitch) -> m.CellSwitched:
    return await _cell("cell_to_train", argument, m.CellSwitched, argument.cell, argument.run_id, argument.reason)


async def cell_to_rollout(argument: m.CellSwitch) -> m.CellSwitched:
    return await _cell("cell_to_rollout", argument, m.CellSwitched, argument.cell, argument.run_id, argument.reason)


async def cell_load_weights(argument: m.CellWeights) -> m.CellServing:
    summary = f"weights of v{argument.version}"
    return await _cell("cell_load_weights", argument, m.CellServing, argument.cell, argument.run_id, summary)


async def finish_step(argument: m.FinishStep, central: str) -> m.FinishedStep:
    """Waits on the cell until every gradient of the step is in, so it may take as long as the step's training."""
    summary = "all gradients in, optimizer step, checkpoint, publish"
    return await _cell("finish_step", argument, m.FinishedStep, central, argument.run_id, summary, timedelta(days=1))


async def _cell(
    name: str, argument: object, result: type[T], cell: str, run_id: str, summary: str,
    limit: timedelta = timedelta(minutes=30),
) -> T:  # fmt: skip
    return await _call(
        name, argument, result,
        queue=cell_queue(run_id, cell), limit=limit, heartbeat=CELL_HEARTBEAT, retry=_FOREVER, summary=summary,
    )  # fmt: skip


def start_cell_train(argument: m.CellTrain) -> workflow.ActivityHandle[m.CellTrained]:
    """Runs until it is cancelled; its worker ends it between two micro-batches."""
    return workflow.start_activity(
        "cell_train",
        argument,
        result_type=m.CellTrained,
        task_queue=cell_queue(argument.run_id, argument.cell),
        start_to_close_timeout=timedelta(days=30),
        heartbeat_timeout=CELL_HEARTBEAT,
        retry_policy=_FOREVER,
        cancellation_type=WAIT,
        summary="micro-batches, until the cell is called back",
    )
