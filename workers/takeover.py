"""Taking over from a process that died: its activities are retried at once, not after their heartbeat time-out."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from sqlalchemy import Engine, select
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from gyre.store import queries as q
from gyre.store.db import transaction
from gyre.store.models import Rollout
from workflows.names import cell_workflow, step_workflow

if TYPE_CHECKING:  # it imports torch, which a rollout host has no use for
    from activities.cell_site import CellSite

log = logging.getLogger(__name__)

HOST_ACTIVITIES = ("run_harness", "score")
CELL_ACTIVITIES = ("cell_to_train", "cell_train", "cell_to_rollout", "cell_load_weights", "finish_step")


async def release_predecessor(client: Client, engine: Engine, host: str) -> int:
    """Fail the started activities that an earlier process of `host` left behind; how many there were.

    Call it before this process polls, and only while it alone is `host`. Temporal then retries them, and the new
    attempts attach to the harnesses that still run.
    """
    with transaction(engine) as session:
        left = session.scalars(select(Rollout.id).where(Rollout.host == host, Rollout.state != "settled")).all()
    released = 0
    why = ApplicationError("the host's process was restarted", type="HostRestarted")
    for rollout in left:
        released += await _release(client, rollout, HOST_ACTIVITIES, why)
    if left:
        log.info("%d rollouts of %s are open; %d activities of the process before were released", len(left), host,
                 released)  # fmt: skip
    return released


async def release_agents_before(client: Client, site: CellSite) -> int:
    """End the started activities of the agents that had the cell before; how many there were. Temporal then retries
    them, except for what was cancelled.

    Call it once the cell is this agent's and before this process polls. An agent before that still lives can commit
    nothing any more, so nothing is lost. Where Temporal cannot say what they were, their time-outs end them.
    """
    run_id, workflows = site.run.run_id, [cell_workflow(site.run.run_id, site.name)]
    if site.central:
        steps = await site.store.look(lambda s: q.unfinished_steps(s, run_id))
        workflows += [step_workflow(run_id, index) for index in steps]
    released = 0
    why = ApplicationError(f"the agent of cell {site.name} was replaced", type="AgentReplaced")
    try:
        for workflow in workflows:
            released += await _release(client, workflow, CELL_ACTIVITIES, why, cancelled=True)
    except RPCError as error:
        log.warning("cell %s: activities of the agent before wait for their time-outs: %s", site.name, error)
    if released:
        log.info("cell %s: %d activities of the agent before were released", site.name, released)
    return released


async def _release(
    client: Client, workflow_id: str, kinds: Collection[str], why: ApplicationError, *, cancelled: bool = False
) -> int:
    """`cancelled`: also what the workflow has cancelled and waits for, which then has ended so."""
    ended = [PendingActivityState.PENDING_ACTIVITY_STATE_CANCEL_REQUESTED] if cancelled else []
    try:
        description = (await client.get_workflow_handle(workflow_id).describe()).raw_description
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            return 0
        raise
    run_id, released = description.workflow_execution_info.execution.run_id, 0
    for pending in description.pending_activities:
        to_end = pending.state in ended
        started = pending.state == PendingActivityState.PENDING_ACTIVITY_STATE_STARTED
        if not (started or to_end) or pending.activity_type.name not in kinds:
            continue
        handle = client.get_async_activity_handle(
            workflow_id=workflow_id, run_id=run_id, activity_id=pending.activity_id
        )
        try:
            await (handle.report_cancellation() if to_end else handle.fail(why))
            released += 1
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:  # it ended meanwhile
                raise
    return released
