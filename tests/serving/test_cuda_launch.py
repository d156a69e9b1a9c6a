"""Commands of cells with CUDA devices. No GPU is needed: what the installed parsers understand is compared."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from pydantic import ValidationError

from gyre.config import CellConfig, ServingConfig
from gyre.serving.launch import sglang_command

SERVING = ServingConfig(max_running=64, kv_tokens=500_000, dtype="bfloat16")


def cell(**fields: object) -> CellConfig:
    return CellConfig.model_validate({"name": "c1", "devices": [4, 5, 6, 7], **fields})


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """The installed server's own."""
    from gyre.serving.cpu_platform import define_torchvision_ops

    define_torchvision_ops()
    from sglang.srt.server_args import ServerArgs

    made = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(made)
    return made


def parsed(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    assert argv[1:3] == ["-m", "sglang.launch_server"]
    return parser.parse_args(argv[3:])


def test_one_machine(policy: Path, parser: argparse.ArgumentParser) -> None:
    argv, env = sglang_command(policy, 30000, SERVING, cell(), version=3, context=1000)
    found = parsed(parser, argv)
    assert (found.device, found.tp_size, found.pp_size, found.nnodes) == ("cuda", 4, 1, 1)
    assert (found.base_gpu_id, found.dist_init_addr, found.mem_fraction_static) == (0, None, None)
    assert found.enable_memory_saver and found.dtype == "bfloat16" and found.weight_version == "3"
    assert (found.max_running_requests, found.max_total_tokens) == (64, 500_000)
    assert env["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert not {"GYRE_SGLANG_FORK", "OMP_NUM_THREADS"} & env.keys()


def test_stages_and_memory(policy: Path, parser: argparse.ArgumentParser) -> None:
    argv, _ = sglang_command(policy, 30000, SERVING, cell(serving={"pipeline_parallel": 2, "memory_fraction": 0.45}))
    found = parsed(parser, argv)
    assert (found.tp_size, found.pp_size, found.mem_fraction_static) == (2, 2, 0.45)


@pytest.mark.parametrize("node", [0, 1])
def test_several_machines(policy: Path, parser: argparse.ArgumentParser, node: int) -> None:
    wide = cell(
        nodes=["gpu-1", "gpu-2"],
        rendezvous_port=31000,
        layout={"tensor_parallel": 8},
        serving={"pipeline_parallel": 2},
    )
    argv, env = sglang_command(policy, 30000, SERVING, wide, node=node, host="0.0.0.0")
    found = parsed(parser, argv)
    assert (found.tp_size, found.pp_size) == (4, 2)  # of all eight devices
    assert (found.nnodes, found.node_rank, found.dist_init_addr) == (2, node, "gpu-1:31001")
    assert env["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"  # of each machine


def test_a_cpu_cell_knows_nothing_of_it(policy: Path, parser: argparse.ArgumentParser) -> None:
    argv, _ = sglang_command(policy, 30000, ServingConfig(), CellConfig(name="c1"))
    found = parsed(parser, argv)
    assert (found.device, found.tp_size, found.pp_size, found.enable_memory_saver) == ("cpu", 1, 1, False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"devices": [], "nodes": ["a", "b"]}, "nodes: a cell of several machines needs devices"),
        ({"nodes": ["a", "a"]}, "nodes: a machine is there twice"),
        ({"nodes": ["a", "b"], "layout": {"tensor_parallel": 3}}, "3 ranks do not divide over 2 machines"),
        ({"layout": {"tensor_parallel": 8}}, "the layout's 8 ranks need as many"),
        ({"serving": {"pipeline_parallel": 3}}, "3 stages do not divide the cell's 4 devices"),
        ({"serving": {"memory_fraction": 1.5}}, "memory_fraction"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        cell(**fields)
