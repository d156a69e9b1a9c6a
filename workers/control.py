"""The control worker: every workflow, and the short database activities (`python -m workers.control`)."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from temporalio.client import Client
from temporalio.worker import PollerBehaviorSimpleMaximum, Worker

from activities.control import ControlActivities
from gyre.store.db import make_engine
from workers.settings import WorkerSettings, settings_or_exit
from workers.temporal import connect, log_to_stderr, run_until_told
from workflows.names import CONTROL_QUEUE
from workflows.registry import WORKFLOWS, workflow_runner

THREADS = 4
"""Database activities at once; each is a few milliseconds."""


def control_worker(client: Client, settings: WorkerSettings, threads: ThreadPoolExecutor) -> Worker:
    """The worker of `gyre-control`. `threads` must have at least THREADS workers."""
    engine = make_engine(settings.database_url, pool_size=THREADS)
    control = ControlActivities(engine, settings.run)
    return Worker(
        client,
        task_queue=CONTROL_QUEUE,
        workflows=WORKFLOWS,
        workflow_runner=workflow_runner(),
        activities=control.all(),
        activity_executor=threads,
        max_concurrent_activities=THREADS,
        max_concurrent_local_activities=THREADS,
        # A workflow that falls out of the cache is replayed from its first event at its next task.
        max_cached_workflows=2 * settings.run.rollouts.max_concurrent + 200,
        max_concurrent_workflow_tasks=8,
        workflow_task_poller_behavior=PollerBehaviorSimpleMaximum(4),
        activity_task_poller_behavior=PollerBehaviorSimpleMaximum(2),
        graceful_shutdown_timeout=timedelta(seconds=3),
    )


async def main(settings: WorkerSettings) -> None:
    """Run until SIGTERM or SIGINT."""
    client = await connect(settings)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="control") as threads:
        await run_until_told([control_worker(client, settings, threads)])


if __name__ == "__main__":
    log_to_stderr()
    asyncio.run(main(settings_or_exit()))
