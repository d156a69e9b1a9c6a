"""`python -m workers.stack.submit`: starts the run's TrainingRun, or attaches to it, and waits for its end.

Prints one line when it has begun (`started` or `attached`) and the result as JSON at the end. Exit code 0: the run is
done or was stopped on request; 1: it failed, with one line on stderr.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from typing import Any

from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import FailureError
from temporalio.service import RPCError, RPCStatusCode

from gyre.store.db import make_engine, transaction
from gyre.store.models import Run
from workers.settings import WorkerSettings, settings_or_exit
from workflows import attributes as a
from workflows.messages import RunResult, TrainingRunInput, plan_of
from workflows.names import CONTROL_QUEUE, run_workflow

# What the client says of a server that is gone or starting, once its own ten seconds of trying again are over.
AWAY = (
    RPCStatusCode.UNAVAILABLE,
    RPCStatusCode.UNKNOWN,
    RPCStatusCode.CANCELLED,
    RPCStatusCode.DEADLINE_EXCEEDED,
    RPCStatusCode.RESOURCE_EXHAUSTED,
)


async def main(settings: WorkerSettings) -> int:
    """Start or attach, then wait."""
    run = settings.run
    _keep_settings(settings)
    client = await Client.connect(settings.temporal_address, namespace=settings.temporal_namespace)
    attached = await _is_running(client, run_workflow(run.run_id))
    handle = await client.start_workflow(
        "TrainingRun",
        TrainingRunInput(plan_of(run)),
        id=run_workflow(run.run_id),
        task_queue=CONTROL_QUEUE,
        result_type=RunResult,
        # A run that has ended goes on where Postgres says that it is; one that runs is joined.
        id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        search_attributes=a.attributes((a.RUN, run.run_id), (a.STATE, "running")),
        static_summary=f"{run.run_id}: {run.steps} steps",
    )
    print("attached" if attached else "started", flush=True)
    try:
        result = await _result(handle)
    except WorkflowFailureError as error:
        print(f"TrainingRun {run.run_id} failed: {_root_cause(error)}", file=sys.stderr, flush=True)
        return 1
    print(json.dumps(dataclasses.asdict(result)), flush=True)
    return 1 if result.state == "failed" else 0


async def _result(handle: WorkflowHandle[Any, RunResult]) -> RunResult:
    """The run's result, waited for through any outage of Temporal's server: the run outlives it, so its waiter does."""
    while True:
        try:
            return await handle.result()
        except RPCError as error:
            if error.status not in AWAY:
                raise
            print(f"Temporal does not answer ({error.message}); still waiting", file=sys.stderr, flush=True)
            await asyncio.sleep(1.0)


def _keep_settings(settings: WorkerSettings) -> None:
    """A resumed run may have more steps than it began with; its row says so then."""
    engine = make_engine(settings.database_url, pool_size=1)
    with transaction(engine) as session:
        row = session.get(Run, settings.run.run_id)
        if row is not None:
            row.config = settings.run.model_dump(mode="json")
    engine.dispose()


async def _is_running(client: Client, workflow_id: str) -> bool:
    try:
        description = await client.get_workflow_handle(workflow_id).describe()
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            return False
        raise
    return description.status == WorkflowExecutionStatus.RUNNING


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = error.message if isinstance(error, FailureError) else str(error)
    return " ".join(text.split()) or type(error).__name__


if __name__ == "__main__":
    code = asyncio.run(main(settings_or_exit()))
    sys.stdout.flush()
    # Threads of Temporal's client may still log while the interpreter ends, which aborts it.
    os._exit(code)
