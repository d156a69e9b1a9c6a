"""Megatron's process groups: one rank needs no port or environment; several come from `torchrun`."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from gyre.training import megatron_cpu

megatron_cpu.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402


def initialize(seed: int = 0, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> None:
    """Make the default process group and Megatron's, once a process; later calls only seed again.

    Under `torchrun` the rank and world come from its environment; otherwise the world is this process alone and the
    rendezvous is a store in memory, so that no port is taken.
    """
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if "TORCHELASTIC_RUN_ID" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_parallel, pipeline_parallel)
    model_parallel_cuda_manual_seed(seed)
