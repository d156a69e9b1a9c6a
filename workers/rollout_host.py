"""A rollout host: workspaces, harnesses and scoring on one machine (`python -m workers.rollout_host`).

Harnesses are detached processes: they outlive this one, and the next process of the same host finds them again.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import IO

from temporalio.client import Client
from temporalio.worker import PollerBehaviorSimpleMaximum, Worker

from activities.beat import EVERY_S
from activities.rollout import RolloutActivities
from gyre.harness.base import Harness, HarnessError
from gyre.harness.forkserver import ForkServer
from gyre.harness.registry import make_harness
from gyre.store.db import make_engine
from workers.settings import WorkerSettings, fail, settings_or_exit
from workers.takeover import release_predecessor
from workers.temporal import connect, log_to_stderr, run_until_told
from workflows.names import ROLLOUTS_QUEUE, host_queue

log = logging.getLogger(__name__)

PREPARES = 4
"""Workspaces made at once."""
SLACK = 16
"""Activities beyond the launch window: rollouts that score while their successors have started."""


def host_id(data: Path) -> tuple[str, IO[str]]:
    """This host's id, the same after every restart on the same data folder, and its lock, held while the file is open.

    Exits with one line when another process is this host.
    """
    data.mkdir(parents=True, exist_ok=True)
    file = (data / "host-id").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"{data / 'host-id'}: another rollout host runs on this data folder; stop it, or use another --data")
    file.seek(0)
    known = file.read().strip()
    if not known:
        known = f"{socket.gethostname().split('.')[0].lower()[:20]}-{secrets.token_hex(3)}"
        file.write(known)
        file.flush()
        os.fsync(file.fileno())
    return known, file


def fork_server(settings: WorkerSettings) -> ForkServer | None:
    """The warm fork-server of the run's harness, started; None where the harness has none. Raises HarnessError."""
    preload = make_harness(settings.run.harness).preload
    if preload is None:
        return None
    server = ForkServer(preload, settings.sockets, settings.logs / "fork-server.log")
    server.start()
    log.info("fork-server is up: %s", server.facts)
    return server


def host_workers(
    client: Client, settings: WorkerSettings, host: str, warm: ForkServer | None, graders: ThreadPoolExecutor,
    threads: ThreadPoolExecutor,
) -> list[Worker]:  # fmt: skip
    """The workers of this host's two queues. `threads` must have at least PREPARES workers."""

    def warm_for(harness: Harness) -> ForkServer | None:
        return warm

    activities = RolloutActivities(
        make_engine(settings.database_url, pool_size=6), host, settings.data / "rollouts", settings.gateway_urls,
        graders, warm_for,
    )  # fmt: skip
    beat = timedelta(seconds=EVERY_S)
    return [
        Worker(
            client,
            task_queue=ROLLOUTS_QUEUE,
            activities=[activities.prepare],
            activity_executor=threads,
            max_concurrent_activities=PREPARES,
            activity_task_poller_behavior=PollerBehaviorSimpleMaximum(2),
        ),
        Worker(
            client,
            task_queue=host_queue(host),
            activities=[activities.run_harness, activities.score],
            max_concurrent_activities=settings.run.rollouts.max_concurrent + SLACK,
            activity_task_poller_behavior=PollerBehaviorSimpleMaximum(2),
            max_heartbeat_throttle_interval=beat,
            default_heartbeat_throttle_interval=beat,
        ),
    ]


async def main(settings: WorkerSettings) -> None:
    """Run until SIGTERM or SIGINT; harnesses go on."""
    host, lock = host_id(settings.data)
    with lock:
        try:
            warm = await asyncio.to_thread(fork_server, settings)
        except HarnessError as error:
            fail(str(error))
        client = await connect(settings)
        await release_predecessor(client, make_engine(settings.database_url, pool_size=1), host)
        graders = ThreadPoolExecutor(max(2, os.cpu_count() or 1), thread_name_prefix="grade")
        threads = ThreadPoolExecutor(PREPARES, thread_name_prefix="prepare")
        try:
            await run_until_told(host_workers(client, settings, host, warm, graders, threads))
        finally:
            threads.shutdown(wait=False)
            graders.shutdown(wait=False, cancel_futures=True)
            if warm is not None:
                warm.stop()


if __name__ == "__main__":
    log_to_stderr()
    asyncio.run(main(settings_or_exit()))
