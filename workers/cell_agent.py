"""The agent of a cell: `python -m workers.cell_agent --cell NAME`, settings by environment.

One process that owns the cell's SGLang server and its trainer, and a Temporal worker on the cell's own queue. Killed,
it takes both with it; started again, it starts them anew.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from datetime import timedelta
from typing import NoReturn

from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError
from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.worker import Worker

from activities.cell import CellActivities
from activities.cell_process import CannotStart
from activities.cell_site import PROGRAMS, CellSite, Programs
from activities.cell_store import OUTAGE_S
from gyre.ports import is_loopback
from gyre.store.db import STOPPED_S, make_engine
from gyre.store.queries import FencedError
from workers.settings import REPLACED, WorkerSettings, fail, settings_or_exit
from workers.takeover import release_agents_before
from workflows.names import cell_queue

log = logging.getLogger("gyre.cell")

HEARTBEAT = timedelta(seconds=0.5)
"""How often heartbeats reach the server, and so how late a cancellation may arrive."""


def main(programs: Programs = PROGRAMS) -> None:
    """Serve until SIGTERM or SIGINT. `programs`: what the agent runs as its engine and its trainer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", required=True, help="name of the cell in the run file")
    parser.add_argument(
        "--stay", action="store_true", help="where another agent takes the cell: sleep until a signal, do not end"
    )
    arguments = parser.parse_args()
    cell = arguments.cell
    settings = settings_or_exit()
    names = [c.name for c in settings.run.cells]
    if cell not in names:
        fail(f"--cell: the run has no cell {cell!r}; its cells are {names}")
    _check_machine(settings, cell)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        asyncio.run(serve(settings, cell, programs))
    except FencedError as error:
        _replaced(error, arguments.stay)
    except OperationalError as error:
        _without_database(settings, cell, error)
    except ExceptionGroup as group:
        if (fenced := group.subgroup(FencedError)) is not None:
            _replaced(fenced.exceptions[0], arguments.stay)
        if (lost := group.subgroup(OperationalError)) is not None:
            _without_database(settings, cell, lost.exceptions[0])
        if (vain := group.subgroup(CannotStart)) is None:
            raise
        fail(f"cell {cell}: {vain.exceptions[0]}")  # its code tells the supervisor that a restart would not help


def _check_machine(settings: WorkerSettings, cell: str) -> None:
    """One line and exit code 2 where this machine lacks what a cell of a run on several machines needs."""
    run, host = settings.run, settings.host
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        fail(f"GYRE_HOST: {host} is no name that this machine knows ({error}); set it to this machine's address")
    if run.stack.remote_cells and is_loopback(address):
        fail(
            f"GYRE_HOST is {host}{'' if address == host else f', here {address}'}, which other machines do not reach, "
            "but the run has cells on several (stack.remote_cells); set it to this machine's address in their network"
        )
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            fail(f"GYRE_HOST: {host} is no address of this machine; `ip address` shows them")
    if not run.policy.path.is_dir():
        fail(f"cell {cell}: policy.path: no folder {run.policy.path} on this machine; have the run's machines share it")


def _replaced(error: BaseException, stay: bool) -> NoReturn:
    print(f"gyre: {error}", file=sys.stderr, flush=True)
    if stay:  # what starts again whatever ends would have the two agents take the cell from each other for ever
        os.execvp("sleep", ["sleep", "infinity"])
    raise SystemExit(REPLACED) from None


def _without_database(settings: WorkerSettings, cell: str, error: BaseException) -> NoReturn:
    """One line and exit code 1: whoever started this agent may do so again, and the database be back."""
    log.debug("ends", exc_info=error)
    where = make_url(settings.database_url)
    print(
        f"gyre: cell {cell}: Postgres at {where.host}:{where.port} has not answered for {OUTAGE_S:.0f} s; if its stack "
        f"has another address now, `gyre cells` prints it ({str(error).splitlines()[0]})",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    raise SystemExit(1) from None


async def serve(settings: WorkerSettings, cell: str, programs: Programs) -> None:
    """Keep the cell and answer its queue until a signal."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    site = CellSite(
        settings.run,
        cell,
        make_engine(settings.database_url, stopped_s=STOPPED_S),
        logs=settings.logs,
        sockets=settings.sockets,
        env=settings.to_env(),
        programs=programs,
        host=settings.host,
    )
    keeping = asyncio.create_task(site.keep())
    answering = asyncio.create_task(_answer(settings, site))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({keeping, answering, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        # The worker first: its activities still need the processes to end well.
        for task in (answering, keeping, stopping):
            task.cancel()
            await asyncio.wait({task})
    for task in (answering, keeping):
        if not task.cancelled():
            task.result()  # raises what ended it, and the supervisor starts this agent anew


async def _answer(settings: WorkerSettings, site: CellSite) -> None:
    await site.taken.wait()
    client = await _connect(settings)
    await release_agents_before(client, site)
    worker = Worker(
        client,
        task_queue=cell_queue(settings.run.run_id, site.name),
        activities=CellActivities(site).all(),
        max_concurrent_activities=8,
        max_heartbeat_throttle_interval=HEARTBEAT,
        default_heartbeat_throttle_interval=HEARTBEAT,
        graceful_shutdown_timeout=timedelta(0),
    )
    await worker.run()


async def _connect(settings: WorkerSettings) -> Client:
    """Temporal's client; waits for a server that is not up yet."""
    pause = 0.5
    while True:
        try:
            return await Client.connect(settings.temporal_address, namespace=settings.temporal_namespace)
        except (RPCError, RuntimeError) as error:
            log.warning("Temporal at %s does not answer: %s", settings.temporal_address, str(error).split(": tonic")[0])
        await asyncio.sleep(pause)
        pause = min(2 * pause, 8.0)


if __name__ == "__main__":
    main()
