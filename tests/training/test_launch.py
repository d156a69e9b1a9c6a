"""How a cell's trainer is started, on one machine and over several."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from gyre.config import CellConfig
from gyre.training.launch import trainer_command

SOCKET = Path("/run/trainer.sock")
SERVED = ["--cell", "c1", "--socket", str(SOCKET), "--epoch", "3"]


def test_on_one_machine_it_starts_its_other_ranks_itself() -> None:
    cell = CellConfig.model_validate({"name": "c1", "layout": {"tensor_parallel": 2}})
    assert trainer_command("some.module", cell, SOCKET, 3) == ([sys.executable, "-m", "some.module", *SERVED], {})


def test_it_sees_the_cells_devices_alone() -> None:
    cell = CellConfig.model_validate({"name": "c1", "devices": [2, 3], "layout": {"tensor_parallel": 2}})
    argv, env = trainer_command("some.module", cell, SOCKET, 3)
    assert argv == [sys.executable, "-m", "some.module", *SERVED]
    assert env == {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@pytest.mark.parametrize("node", [0, 1])
def test_over_several_machines_torchrun_starts_each_ones_share(node: int) -> None:
    cell = CellConfig.model_validate(
        {
            "name": "c1",
            "devices": [0, 1, 2, 3],
            "nodes": ["gpu-1", "gpu-2"],
            "rendezvous_port": 31000,
            "layout": {"tensor_parallel": 4, "pipeline_parallel": 2},
        }
    )
    argv, env = trainer_command("some.module", cell, SOCKET, 3, node=node)
    assert argv[:3] == [sys.executable, "-m", "torch.distributed.run"]
    found = get_args_parser().parse_args(argv[3:])
    assert (found.nnodes, found.node_rank, found.nproc_per_node) == ("2", node, "4")
    assert (found.master_addr, found.master_port, found.max_restarts) == ("gpu-1", 31000, 0)
    assert found.module and [found.training_script, *found.training_script_args] == ["some.module", *SERVED]
    assert env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
