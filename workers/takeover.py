"""Taking over from a host process that died: its activities are retried at once, not after their heartbeat time-out."""

from __future__ import annotations

import logging

from sqlalchemy import Engine, select
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from gyre.store.db import transaction
from gyre.store.models import Rollout

log = logging.getLogger(__name__)


async def release_predecessor(client: Client, engine: Engine, host: str) -> int:
    """Fail the started activities that an earlier process of `host` left behind; how many there were.

    Call it before this process polls, and only while it alone is `host`. Temporal then retries them, and the new
    attempts attach to the harnesses that still run.
    """
    with transaction(engine) as session:
        left = session.scalars(select(Rollout.id).where(Rollout.host == host, Rollout.state != "settled")).all()
    released = 0
    for rollout in left:
        released += await _release(client, rollout)
    if left:
        log.info("%d rollouts of %s are open; %d activities of the process before were released", len(left), host,
                 released)  # fmt: skip
    return released


async def _release(client: Client, rollout: str) -> int:
    try:
        description = (await client.get_workflow_handle(rollout).describe()).raw_description
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            return 0
        raise
    run_id, released = description.workflow_execution_info.execution.run_id, 0
    for pending in description.pending_activities:
        started = pending.state == PendingActivityState.PENDING_ACTIVITY_STATE_STARTED
        if not started or pending.activity_type.name not in ("run_harness", "score"):
            continue
        handle = client.get_async_activity_handle(workflow_id=rollout, run_id=run_id, activity_id=pending.activity_id)
        try:
            await handle.fail(ApplicationError("the host's process was restarted", type="HostRestarted"))
            released += 1
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:  # it ended meanwhile
                raise
    return released
