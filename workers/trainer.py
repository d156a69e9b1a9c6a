"""The trainer process of a cell: `python -m workers.trainer --cell NAME --socket PATH`, settings by environment.

Where the cell's layout has several ranks, this process is rank 0 and starts the others, which live as long as it does.
Under `torchrun` (a layout over several machines) the ranks are there already; the first one serves. torchrun leaves its
ranks behind when it is killed, as it is when the cell's agent is: so each of them sees to its own end.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gyre.config import CellConfig
from gyre.serving.process import child_setup, die_with_parent
from gyre.store.queries import FencedError
from gyre.training.hf_config import UnsupportedModelError, check_layout, read_shape
from gyre.training.protocol import KEEPER, RENDEZVOUS, TOKEN
from gyre.training.pulse import beat, end_of, start_rank
from gyre.training.service import Commands, TrainerService
from workers.settings import WorkerSettings, fail, settings_or_exit

if TYPE_CHECKING:
    from gyre.training.trainer import Trainer

log = logging.getLogger("gyre.trainer")


MakeTrainer = Callable[[WorkerSettings, CellConfig], "Trainer"]


def main(make_trainer: MakeTrainer | None = None) -> None:
    """Serve commands until SIGTERM. `make_trainer` gives what computes; None: Megatron, in the cell's layout."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if under_torchrun:
        keeper = os.environ.get(KEEPER)  # none on the cell's other machines
        die_with_parent(None if keeper is None else int(keeper))
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--cell", required=True, help="name of the cell in the run file")
    arguments.add_argument("--socket", required=True, type=Path, help="unix socket to listen at")
    arguments.add_argument("--epoch", default=0, type=int, help="of the agent that has taken the cell")
    parsed = arguments.parse_args()
    settings = settings_or_exit()
    cell = next((c for c in settings.run.cells if c.name == parsed.cell), None)
    if cell is None:
        fail(f"--cell: the run has no cell {parsed.cell!r}; its cells are {[c.name for c in settings.run.cells]}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stdout)
    incarnation = uuid.uuid4().hex
    layout = cell.layout
    if layout.ranks > 1 and RENDEZVOUS not in os.environ and not under_torchrun:
        try:  # while there is one process to say so
            check_layout(read_shape(settings.run.policy.path), layout.tensor_parallel, layout.pipeline_parallel)
        except UnsupportedModelError as error:
            fail(f"cell {cell.name}: {error}")
        _start_followers(parsed.socket, layout.ranks, incarnation)
    rank = int(os.environ.get("RANK", "0")) if layout.ranks > 1 else 0
    _pin(cell, rank)
    if rank > 0:
        _follow(settings, cell)
    token = os.environ.get(TOKEN)
    service = TrainerService(
        parsed.socket,
        incarnation,
        lambda: _replica(settings, cell, parsed.epoch, incarnation, make_trainer),
        None if token is None else (settings.host, token),
    )
    asyncio.run(_serve(service))


def _start_followers(socket: Path, ranks: int, incarnation: str) -> None:
    """Become rank 0 and start the others. When one of them ends, or is stopped, this process ends, and they with it."""
    socket.parent.mkdir(parents=True, exist_ok=True)
    for file in socket.parent.glob(f".{socket.stem}-*.rendezvous"):  # of trainers that were killed
        file.unlink(missing_ok=True)
    meeting = socket.with_name(f".{socket.stem}-{incarnation}.rendezvous")
    os.environ |= {RENDEZVOUS: str(meeting), "WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0"}
    for rank in range(1, ranks):
        process, heard = start_rank(
            [sys.executable, "-m", "workers.trainer", *sys.argv[1:]],
            {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            child_setup(),
        )
        threading.Thread(target=_end_with, args=(process, heard, rank), daemon=True).start()


def _end_with(process: subprocess.Popen[bytes], heard: int, rank: int) -> None:
    log.error("rank %d of the trainer %s; the trainer ends", rank, end_of(process, heard))
    os._exit(1)


def _follow(settings: WorkerSettings, cell: CellConfig) -> None:
    beat()
    import torch

    from gyre.training.ranks import follow_leader

    torch.set_num_threads(_threads(cell))
    try:
        follow_leader(settings.run, cell.name)
    except Exception:
        log.exception("rank %s ends", os.environ["RANK"])
        os._exit(1)


def _pin(cell: CellConfig, rank: int) -> None:
    """Keep this process on its share of the cell's cores. Before torch is imported: it sizes its threads once."""
    if known := os.sched_getaffinity(0) & set(cell.cpus):  # none: the agent chose others, and set them already
        os.sched_setaffinity(0, known)
    if cell.cpus and cell.layout.ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[rank :: cell.layout.ranks] or {cores[rank % len(cores)]})
    threads = str(_threads(cell))
    os.environ.update(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads)
    if cell.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, cell.devices))


def _threads(cell: CellConfig) -> int:
    """One a core that this process is pinned to."""
    return len(os.sched_getaffinity(0)) if cell.cpus else 1


def _replica(
    settings: WorkerSettings, cell: CellConfig, epoch: int, incarnation: str, make_trainer: MakeTrainer | None
) -> Commands:
    started = time.perf_counter()
    # Imported here, on the work thread: torch and Megatron take seconds, and the socket answers meanwhile.
    import torch

    from gyre.store import db
    from gyre.store.db import make_engine
    from gyre.training.replica import Replica, ReplicaSettings

    torch.set_num_threads(_threads(cell))
    imported = time.perf_counter()
    replica = Replica(
        ReplicaSettings(settings.run, cell.name, cell.central, settings.checkpoints, incarnation, epoch, settings.host),
        make_engine(settings.database_url, pool_size=1, stopped_s=db.STOPPED_S),
        None if make_trainer is None else make_trainer(settings, cell),
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
    except FencedError as error:
        log.error("the trainer ends: %s", error)
        os._exit(1)
    except Exception:
        log.exception("the trainer cannot start")
        os._exit(1)


if __name__ == "__main__":
    main()
