"""What every worker process of Temporal does alike: connect, run until it is told to end."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from temporalio.client import Client
from temporalio.worker import Worker

from workers.settings import WorkerSettings

log = logging.getLogger(__name__)


async def connect(settings: WorkerSettings) -> Client:
    """A client of the stack's namespace; waits for a server that is not up yet."""
    last = ""
    while True:
        try:
            return await Client.connect(settings.temporal_address, namespace=settings.temporal_namespace)
        except RuntimeError as error:
            if str(error) != last:
                log.info("Temporal at %s does not answer yet: %s", settings.temporal_address, error)
            last = str(error)
            await asyncio.sleep(0.5)


async def run_until_told(workers: Sequence[Worker]) -> None:
    """Run the workers until SIGTERM or SIGINT, or until one of them fails, which is raised."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    running = [asyncio.create_task(worker.run()) for worker in workers]
    waiting = asyncio.create_task(told.wait())
    done, _ = await asyncio.wait([*running, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    await asyncio.gather(*(worker.shutdown() for worker in workers))
    for task in done - {waiting}:
        task.result()


def log_to_stderr() -> None:
    """Plain lines with times; the supervisor puts them in the process's log."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
