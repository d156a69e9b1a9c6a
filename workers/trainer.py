"""The trainer process of a cell: `python -m workers.trainer --cell NAME --socket PATH`, settings by environment."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import resource
import signal
import sys
import time
import uuid
from pathlib import Path

from gyre.config import CellConfig
from gyre.training.service import Commands, TrainerService
from workers.settings import WorkerSettings, fail, settings_or_exit

log = logging.getLogger("gyre.trainer")


def main() -> None:
    """Serve commands until SIGTERM."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--cell", required=True, help="name of the cell in the run file")
    arguments.add_argument("--socket", required=True, type=Path, help="unix socket to listen at")
    parsed = arguments.parse_args()
    settings = settings_or_exit()
    cell = next((c for c in settings.run.cells if c.name == parsed.cell), None)
    if cell is None:
        fail(f"--cell: the run has no cell {parsed.cell!r}; its cells are {[c.name for c in settings.run.cells]}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stdout)
    _pin(cell)
    incarnation = uuid.uuid4().hex
    service = TrainerService(parsed.socket, incarnation, lambda: _replica(settings, cell, incarnation))
    asyncio.run(_serve(service))


def _pin(cell: CellConfig) -> None:
    """Keep this process on its cell's cores. Before torch is imported: it sizes its threads once."""
    if cores := os.sched_getaffinity(0) & set(cell.cpus):  # none: the agent chose others, and set them already
        os.sched_setaffinity(0, cores)
    threads = str(_threads(cell))
    os.environ.update(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads)
    if cell.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, cell.devices))


def _threads(cell: CellConfig) -> int:
    """One a core that the cell is pinned to."""
    return len(os.sched_getaffinity(0)) if cell.cpus else 1


def _replica(settings: WorkerSettings, cell: CellConfig, incarnation: str) -> Commands:
    started = time.perf_counter()
    # Imported here, on the work thread: torch and Megatron take seconds, and the socket answers meanwhile.
    import torch

    from gyre.store.db import make_engine
    from gyre.training.replica import Replica, ReplicaSettings

    torch.set_num_threads(_threads(cell))
    imported = time.perf_counter()
    replica = Replica(
        ReplicaSettings(settings.run, cell.name, cell.central, settings.checkpoints, incarnation),
        make_engine(settings.database_url, pool_size=1),
    )
    replica.start()
    # What is imported and loaded by now stays: `sleep`, and every collection, need not look through it again.
    gc.collect()
    gc.freeze()
    log.info(
        "trainer %s of cell %s: version %s; import %.1f s, load %.1f s, %.0f MB",
        incarnation[:8],
        cell.name,
        replica.version,
        imported - started,
        time.perf_counter() - imported,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )
    return replica


async def _serve(service: TrainerService) -> None:
    # The work thread may be inside a long kernel; nothing it holds in memory is worth waiting for.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, os._exit, 0)
    try:
        await service.serve()
    except Exception:
        log.exception("the trainer cannot start")
        os._exit(1)


if __name__ == "__main__":
    main()
