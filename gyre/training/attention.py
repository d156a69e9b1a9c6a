"""Core attention for Megatron-Core without Transformer Engine: rotary embedding and causal SDPA over packed sequences.

It takes the place of `core_attention` in Megatron's layer spec. Rotary embedding happens here, from tables made once a
micro-batch: Megatron's own packed path applies it sequence by sequence in every layer, twice.

On a CPU one call a sequence on views of the packed row is at least as fast as padding sequences into one batch (the
kernel's time is in the blocks, and nothing is copied or padded), so long as autograd sees one node and not one a
sequence; that node is `_PackedCausal`.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gyre.training import megatron_cpu
from gyre.training.packing import PackedSequences

megatron_cpu.install()

from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

_forward_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_BATCHED_BELOW = 64
"""Equal neighbours up to this length are computed in one call: below it a call costs more than its arithmetic."""


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Rotary embedding, then causal attention inside each packed sequence.

    Queries [T, heads, d], keys and values [T, kv heads, d] to [T, heads * d]. Needs a `PackedSequences`; other
    formats, attention bias, dropout and context parallelism raise.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type != AttnMaskType.causal or attention_type != "self":
            raise ValueError(f"PackedAttention is causal self-attention, not {attention_type} with {attn_mask_type}")
        if config.context_parallel_size > 1:
            raise ValueError("PackedAttention does not split sequences: context_parallel_size must be 1")
        if config.attention_dropout:
            raise ValueError("PackedAttention has no dropout: attention_dropout must be 0")
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        packed = packed_seq_params
        if not isinstance(packed, PackedSequences) or packed.cos is None or packed.sin is None:
            raise TypeError("PackedAttention needs packed_seq_params made by gyre.training.packing.pack")
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("PackedAttention takes no attention mask or bias: sequences are causal by construction")
        query, key = rotate(query, packed.cos, packed.sin), rotate(key, packed.cos, packed.sin)
        out = packed_causal_attention(query, key, value, packed.lengths, self.scale)
        return out.reshape(query.size(0), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, d], half-split as in Llama and Qwen; cos and sin are [T, d / 2]."""
    out: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), None, None  # a rotation's transpose is the rotation back


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    left, right = out.chunk(2, -1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=right).addcmul_(first, sin)
    return out


def packed_causal_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scale: float
) -> Tensor:
    """Causal attention inside each of the sequences that lie one after another; [T, heads, d].

    Key and value heads may be fewer than query heads (grouped queries).
    """
    if query.device.type == "cpu":
        out: Tensor = _PackedCausal.apply(query, key, value, lengths, scale)  # type: ignore[no-untyped-call]
        return out
    outs = []
    for q, k, v in zip(*(torch.split(x, list(lengths)) for x in (query, key, value)), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        one = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.size(1) != k.size(1))
        outs.append(one[0].transpose(0, 1))
    return torch.cat(outs)


def _runs(lengths: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(start, count, length) of the calls to make."""
    runs, start = [], 0
    for length, same in groupby(lengths):
        count = len(list(same))
        if length <= _BATCHED_BELOW:
            runs.append((start, count, length))
        else:
            runs.extend((start + i * length, 1, length) for i in range(count))
        start += count * length
    return runs


def _view(x: Tensor, start: int, count: int, length: int) -> Tensor:
    """[T, heads, d] to a view [count, heads, length, d] of `count` sequences from `start`."""
    return x[start : start + count * length].view(count, length, *x.shape[1:]).transpose(1, 2)


class _PackedCausal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
        ctx.runs, ctx.scale = _runs(lengths), scale
        out = torch.empty(q.shape, dtype=q.dtype)
        sums = []
        for run in ctx.runs:
            one, logsumexp = _forward_cpu(_view(q, *run), _view(k, *run), _view(v, *run), 0.0, True, scale=scale)
            _view(out, *run).copy_(one)
            sums.append(logsumexp)
        ctx.save_for_backward(q, k, v, out, *sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *sums = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        for run, logsumexp in zip(ctx.runs, sums, strict=True):
            views = (_view(x, *run) for x in (grad, q, k, v, out))
            parts = _backward_cpu(*views, logsumexp, 0.0, True, scale=ctx.scale)
            for whole, part in zip((dq, dk, dv), parts, strict=True):
                _view(whole, *run).copy_(part)
        return dq, dk, dv, None, None
