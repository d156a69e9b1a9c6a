"""HiCache's copies between host pool and 'device' pool in plain torch (SGLang's own kernels are CUDA only).

Covers pools of multi-head attention. `pool.k_data_refs[layer]` is `[tokens, heads, dim]`, or
`[pages, page, heads, dim]` under the layout `page_first_direct`.
"""

from __future__ import annotations

from typing import Any

import torch


def _host_index(pool: Any, indices: torch.Tensor) -> Any:
    if pool.layout == "page_first_direct":
        return indices // pool.page_size, indices % pool.page_size
    return indices


def load_to_device_per_layer(
    self: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """Copy one layer's keys and values of `host_indices` to `device_indices`."""
    if not is_draft and not 0 <= layer_id < self.target_layer_num:
        return
    rows = _host_index(self, host_indices)
    self.device_k_buffers[layer_id][device_indices] = self.k_data_refs[layer_id][rows]
    self.device_v_buffers[layer_id][device_indices] = self.v_data_refs[layer_id][rows]


def backup_from_device_all_layer(
    self: Any, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
) -> None:
    """Copy every layer's keys and values of `device_indices` to `host_indices`."""
    rows = _host_index(self, host_indices)
    for layer in range(self.layer_num):
        self.k_data_refs[layer][rows] = self.device_k_buffers[layer][device_indices]
        self.v_data_refs[layer][rows] = self.device_v_buffers[layer][device_indices]


def _no_pin(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs["pin_memory"] = False
    return args, kwargs


def register() -> None:
    """Put the copies above in the place of SGLang's."""
    from sglang.srt.mem_cache.pool_host import base
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # 10 GiB that must stay free beside the host pool, or the server does not start: more than a small machine has.
    # `gyre.serving.kv` has looked whether there is room.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0

    pool = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost"
    HookRegistry.register(f"{pool}.load_to_device_per_layer", load_to_device_per_layer, HookType.REPLACE)
    HookRegistry.register(f"{pool}.backup_from_device_all_layer", backup_from_device_all_layer, HookType.REPLACE)
    HookRegistry.register("sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__", _no_pin, HookType.BEFORE)
