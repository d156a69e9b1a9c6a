"""`python -m workers.tell pause|resume|stop [--finish-steps]`: tells the run of this environment's run file something.

Prints the run's id and its state after it (workflows.messages.RunStatus). Exit code 1, with one line on stderr: the run
is not running, it refused, or nobody answered.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowHandle,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.exceptions import FailureError
from temporalio.service import RPCError, RPCStatusCode

from workers.settings import WorkerSettings, settings_or_exit
from workflows.messages import RunStatus, StopRun
from workflows.names import run_workflow

ANSWER_S = 30.0
"""So long the run has time to answer."""


async def main(settings: WorkerSettings, verb: str, *, finish_steps: bool) -> int:
    """Send the update `verb` and print what the run says."""
    run_id = settings.run.run_id
    try:
        client = await Client.connect(settings.temporal_address, namespace=settings.temporal_namespace)
    except RuntimeError as error:
        return _refuse(f"Temporal at {settings.temporal_address} does not answer: {error}")
    handle = client.get_workflow_handle(run_workflow(run_id))
    arguments = [StopRun(wait=finish_steps)] if verb == "stop" else []
    try:
        async with asyncio.timeout(ANSWER_S):
            told = await handle.execute_update(verb, args=arguments, result_type=RunStatus)
    except (TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError):
        return _refuse(
            f"{run_id} did not answer for {ANSWER_S:g} s, but may still do so; is its control worker up? (gyre status)"
        )
    except WorkflowUpdateFailedError as error:
        cause = error.cause
        return _refuse(f"{run_id}: {cause.message if isinstance(cause, FailureError) else cause}")
    except RPCError as error:
        if error.status != RPCStatusCode.NOT_FOUND:
            return _refuse(f"Temporal at {settings.temporal_address}: {error.message}")
        return _refuse(f"no run is running: {run_id} {await _why(handle)}; `gyre train RUN.toml` starts it or goes on")
    print(told.run_id, told.state, flush=True)
    return 0


async def _why(handle: WorkflowHandle[object, object]) -> str:
    """Why a run takes no update."""
    try:
        status = (await handle.describe()).status
    except RPCError as error:
        if error.status != RPCStatusCode.NOT_FOUND:
            raise
        return "has not begun"
    return "has failed" if status == WorkflowExecutionStatus.FAILED else "has ended"


def _refuse(why: str) -> int:
    print(f"gyre: {' '.join(why.split())}", file=sys.stderr, flush=True)
    return 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers.tell")
    parser.add_argument("verb", choices=("pause", "resume", "stop"))
    parser.add_argument("--finish-steps", action="store_true", help="for stop: let the open steps end first")
    return parser.parse_args()


if __name__ == "__main__":
    given = _arguments()
    code = asyncio.run(main(settings_or_exit(), given.verb, finish_steps=given.finish_steps))
    sys.stdout.flush()
    # Threads of Temporal's client may still log while the interpreter ends, which aborts it.
    os._exit(code)
