"""The command that starts a cell's trainer on one of its machines, and its additional environment."""

from __future__ import annotations

import sys
from pathlib import Path

from gyre.config import CellConfig


def trainer_command(
    module: str, cell: CellConfig, socket: Path, epoch: int = 0, *, node: int = 0
) -> tuple[list[str], dict[str, str]]:
    """The argv and the additional environment of the trainer of `cell` on its machine number `node`.

    `module` is what runs (`workers.trainer`); it listens at `socket` on the first machine. On one machine it starts its
    other ranks itself; over several, torchrun starts every machine's share, and they meet at the first one's
    `rendezvous_port`. The split of the model is no argument: every rank reads it from the run's configuration.
    """
    served = ["--cell", cell.name, "--socket", str(socket), "--epoch", str(epoch)]
    env: dict[str, str] = {}
    if cell.devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(d) for d in cell.devices)
        # Megatron's tensor parallelism orders its communication before its arithmetic by the order of launches.
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if len(cell.nodes) < 2:
        return [sys.executable, "-m", module, *served], env
    argv = [
        sys.executable, "-m", "torch.distributed.run",
        "--nnodes", str(len(cell.nodes)),
        "--node-rank", str(node),
        "--nproc-per-node", str(cell.layout.ranks // len(cell.nodes)),
        "--master-addr", cell.nodes[0],
        "--master-port", str(cell.rendezvous_port),
        "--max-restarts", "0",  # the agent starts it anew, from a checkpoint
        "--module", module, *served,
    ]  # fmt: skip
    return argv, env
