"""Why an activity was cancelled decides whether its harness ends with it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from temporalio.activity import ActivityCancellationDetails as Details
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode
from temporalio.testing import ActivityEnvironment

from activities.beat import is_cancelled_for_good


class Asked:
    """Stands for a client: the workflow is in this state, or asking fails with this error."""

    def __init__(self, found: WorkflowExecutionStatus | RPCStatusCode) -> None:
        self.found = found

    def get_workflow_handle(self, workflow_id: str, *, run_id: str | None) -> Any:
        assert (workflow_id, run_id) == ("test", "test-run")
        return self

    async def describe(self) -> Any:
        if isinstance(self.found, RPCStatusCode):
            raise RPCError("no", self.found, b"")
        return SimpleNamespace(status=self.found)


RUNNING, TERMINATED = WorkflowExecutionStatus.RUNNING, WorkflowExecutionStatus.TERMINATED


@pytest.mark.parametrize(
    ("why", "found", "for_good"),
    [
        (Details(cancel_requested=True), RUNNING, True),
        (Details(not_found=True), TERMINATED, True),
        (Details(not_found=True), RPCStatusCode.NOT_FOUND, True),
        # The server timed this attempt out (a laptop that slept, a Temporal that was away): another one attaches.
        (Details(not_found=True), RUNNING, False),
        (Details(not_found=True), RPCStatusCode.UNAVAILABLE, False),
        (Details(timed_out=True), RUNNING, False),
        (Details(worker_shutdown=True), RUNNING, False),
        (Details(cancel_requested=True, worker_shutdown=True), RUNNING, False),
    ],
)
async def test_what_ends_a_harness(
    why: Details, found: WorkflowExecutionStatus | RPCStatusCode, for_good: bool
) -> None:
    environment, waits = ActivityEnvironment(client=cast(Client, Asked(found))), asyncio.Event()

    async def wait() -> bool:
        waits.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return await is_cancelled_for_good()
        return False

    running = asyncio.create_task(environment.run(wait))
    await waits.wait()
    environment.cancel(why)
    assert await running is for_good
