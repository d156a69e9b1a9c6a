"""Heartbeats of long activities, and why one was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from temporalio import activity
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

EVERY_S = 8.0
"""Seconds between heartbeats. Each costs the server a write, so it is far below the time-out and no more."""


@asynccontextmanager
async def beating(
    every_s: float = EVERY_S, detail: Callable[[], tuple[Any, ...]] = tuple, *, at_once: bool = False
) -> AsyncIterator[None]:
    """Heartbeat with `detail()` while the block runs; `at_once`: also when it begins, not only after `every_s`."""

    async def beat() -> None:
        if at_once:
            activity.heartbeat(*detail())
        while True:
            await asyncio.sleep(every_s)
            activity.heartbeat(*detail())

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()


async def is_cancelled_for_good() -> bool:
    """Whether the workflow cancelled this activity (or is gone), and not only this worker's hold on it.

    A worker that shuts down, or was out of touch for too long, leaves what it started to the next attempt. Temporal
    says "not found" of an attempt that timed out as it does of a workflow that is gone, so it is asked which it was.
    """
    why = activity.cancellation_details()
    if why is None or why.worker_shutdown:
        return False
    return why.cancel_requested or (why.not_found and not await _workflow_runs())


async def _workflow_runs() -> bool:
    info = activity.info()
    assert info.workflow_id is not None
    handle = activity.client().get_workflow_handle(info.workflow_id, run_id=info.workflow_run_id)
    try:
        return (await handle.describe()).status == WorkflowExecutionStatus.RUNNING
    except RPCError as error:
        return error.status != RPCStatusCode.NOT_FOUND  # it cannot be asked now: nothing is ended on a guess
