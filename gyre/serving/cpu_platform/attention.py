"""Attention of a prefill whose prefix is cached, for the new tokens alone.

SGLang's `torch_native` backend, CPU's only one, puts empty queries in the place of the cached tokens and computes
attention for those too: the square of the whole prompt in every call, however little of it is new.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

BLOCK = 512
"""New tokens that attend as one: what their keys are hidden by has so many rows."""


def gains(new: int, cached: int) -> bool:
    """Whether to attend by blocks: a masked block costs 1.4 times its share of one causal pass (measured on a core)."""
    return cached >= max(new, 1)


def extend(
    whole: Callable[..., Any],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> Any:
    """In the place of `TorchNativeAttnBackend._run_sdpa_forward_extend` (`whole`), which gets what is not plain causal
    self-attention, and each sequence of which little is cached.

    `query`, `output`: [new tokens of all sequences, heads, head]; the caches: [tokens, heads of keys, head].
    """
    plain = causal and not is_cross_attn and encoder_lens is None and sliding_window_size is None
    lengths = [tuple(pair) for pair in zip(extend_seq_lens.tolist(), extend_prefix_lens.tolist(), strict=True)]
    if not plain or query.dtype != k_cache.dtype or not any(gains(*pair) for pair in lengths):
        return whole(
            backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
            extend_seq_lens, encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
        )  # fmt: skip
    at = 0
    for i, (new, cached) in enumerate(lengths):
        q, o = query[at : at + new], output[at : at + new]
        at += new
        if not gains(new, cached):
            one = slice(i, i + 1)
            whole(
                backend, q, o, k_cache, v_cache, req_to_token, req_pool_indices[one], seq_lens[one],
                extend_prefix_lens[one], extend_seq_lens[one], None, scaling, enable_gqa, True, False, None,
            )  # fmt: skip
            continue
        tokens = req_to_token[req_pool_indices[i], : cached + new]
        keys, values = (cache[tokens].movedim(0, 1).unsqueeze(0) for cache in (k_cache, v_cache))
        for start in range(0, new, BLOCK):
            end = min(start + BLOCK, new)
            seen = cached + end
            mask = torch.ones(end - start, seen, dtype=torch.bool).tril_(cached + start)
            found = scaled_dot_product_attention(
                q[start:end].movedim(0, 1).unsqueeze(0), keys[:, :, :seen], values[:, :, :seen],
                attn_mask=mask, scale=scaling, enable_gqa=enable_gqa,
            )  # fmt: skip
            o[start:end] = found.squeeze(0).movedim(0, 1)
    return output


def register() -> None:
    """Put it around SGLang's."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(f"{backend}._run_sdpa_forward_extend", extend, HookType.AROUND)
