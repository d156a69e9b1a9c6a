"""Hooks into SGLang 0.5.23 that CPU serving needs; each replaces a path that assumes CUDA."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from typing import Any

import torch

FORK_VARIABLE = "GYRE_SGLANG_FORK"
"""Set to 1: SGLang forks its scheduler and detokenizer from the server process."""


def _alloc_plain(
    dims: Sequence[int],
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> torch.Tensor:
    tensor: torch.Tensor = allocator.allocate(dims, dtype=dtype, device=device)
    return tensor


def _register_memory_region(model: Any, transfer_engine: Any) -> Any:
    # The second version reads the CUDA allocator's snapshot; the first registers tensor by tensor.
    from sglang.srt.model_loader.remote_instance_weight_loader_utils import register_memory_region_v1

    return register_memory_region_v1(model, transfer_engine)


def _fork_children(result: Any, *args: Any, **kwargs: Any) -> Any:
    # SGLang has just set "spawn", which CUDA needs. On CPU each spawned child imports the engine anew, about ten
    # CPU-seconds and half a gigabyte apiece; a forked one shares what the server has imported.
    multiprocessing.set_start_method("fork", force=True)
    return result


def register() -> None:
    """Register every hook; SGLang applies them after its plug-ins have run."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from gyre.serving.cpu_platform import attention, hicache

    attention.register()
    hicache.register()
    if os.environ.get(FORK_VARIABLE) == "1":
        HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _fork_children, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.model_loader.remote_instance_weight_loader_utils.register_memory_region_v2",
        _register_memory_region,
        HookType.REPLACE,
    )
    # Not hooks but direct assignments, hence the pinned SGLang version: host pools in plain memory, and KV transfer
    # by the plain index path instead of pinned memory and CUDA events.
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    ALLOC_MEMORY_FUNCS["cpu"] = _alloc_plain
    try:
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender
    except ImportError:  # Mooncake's library is absent: nothing to redirect
        return
    MooncakeKVSender.supports_host_tensor_indices = False
