"""Core attention for Megatron-Core without Transformer Engine: rotary embedding and the tree mask over a packed row.

It takes the place of `core_attention` in Megatron's layer spec. Rotary embedding happens here, from tables made once a
micro-batch: Megatron's own packed path applies it sequence by sequence in every layer, twice.

On a CPU no mask exists: a row is causal blocks (one a segment) and full rectangles (the tokens below a segment against
that segment, which lie behind it in one piece), each one call of torch's flash kernel on views of the row. Softmax over
several calls is joined by their log-sum-exps, and the backward of each call with the joint ones is its share of the
joint backward. Autograd sees one node. On CUDA the same mask is a block mask of FlexAttention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from gyre.training import megatron_cpu
from gyre.training.packing import PackedTrees
from gyre.trajectory.packed import TreeRow

megatron_cpu.install()

from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

_forward_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_BLOCK = 128
"""Queries and keys in a block of FlexAttention's mask."""

_BATCHED_BELOW = 64
"""Equal neighbours up to this length are computed in one call: below it a call costs more than its arithmetic."""

_CACHED = 1 << 17
"""Numbers that rotary embedding works on at once on a CPU, so that what one pass writes the next finds in the cache."""


class TreeAttention(MegatronModule):  # type: ignore[misc]
    """Rotary embedding, then attention of each token to those above it in its tree.

    Queries [T, heads, d], keys and values [T, kv heads, d] to [T, heads * d]. Needs a `PackedTrees`; other
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
            raise ValueError(f"TreeAttention is causal self-attention, not {attention_type} with {attn_mask_type}")
        if config.context_parallel_size > 1:
            raise ValueError("TreeAttention does not split sequences: context_parallel_size must be 1")
        if config.attention_dropout:
            raise ValueError("TreeAttention has no dropout: attention_dropout must be 0")
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedTrees | None = None,
    ) -> Tensor:
        packed = packed_seq_params
        if not isinstance(packed, PackedTrees) or packed.row is None or packed.cos is None or packed.sin is None:
            raise TypeError("TreeAttention needs packed_seq_params made by gyre.training.packing.pack")
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("TreeAttention takes no attention mask or bias: the row says who attends to whom")
        query, key = rotate(query, packed.cos, packed.sin), rotate(key, packed.cos, packed.sin)
        if query.device.type == "cpu":
            out = segment_attention(query, key, value, packed.row, self.scale)
        else:
            if packed.block_mask is None:
                packed.block_mask = block_mask(packed.row, query.device)
            out = mask_attention(query, key, value, packed.block_mask, self.scale, _compiled_flex())
        return out.reshape(query.size(0), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, d], half-split as in Llama and Qwen; cos is [T, d], sin [T, d / 2]."""
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
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = max(1, _CACHED * len(x) // x.numel()) if x.device.type == "cpu" else len(x)
    for part, c, s, into in zip(*(torch.split(t, rows) for t in (x, cos[:, None], sin[:, None], out)), strict=True):
        (first, second), (left, right) = part.chunk(2, -1), into.chunk(2, -1)
        torch.mul(part, c, out=into)  # a whole head at once: the inner loop of half a head is too short
        left.addcmul_(second, s, value=-1)
        right.addcmul_(first, s)
    return out


def tree_mask(reach: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention's mask function of a row whose `TreeRow.reach()` is `reach` [T]."""

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < reach[key])

    return attends


def block_mask(row: TreeRow, device: torch.device) -> BlockMask:
    """The tree mask of `row` as FlexAttention's blocks: those that hold nothing are never computed.

    FlexAttention's own `create_block_mask` makes the whole [T, T] mask first. Here a block of keys before a block of
    queries holds something if one of its keys reaches beyond the first query, and everything if all reach beyond the
    last.
    """
    reach = torch.from_numpy(row.reach()).to(device)
    count = -(-row.tokens // _BLOCK)
    padding = (0, count * _BLOCK - row.tokens)
    farthest = torch.nn.functional.pad(reach, padding, value=0).view(count, _BLOCK).amax(1)
    nearest = torch.nn.functional.pad(reach, padding, value=row.tokens).view(count, _BLOCK).amin(1)
    at = torch.arange(count, device=device)
    before = at[None, :] < at[:, None]
    full = before & (nearest[None, :] >= ((at + 1) * _BLOCK).clamp(max=row.tokens)[:, None])
    some = (before & (farthest[None, :] > (at * _BLOCK)[:, None]) & ~full) | (at[None, :] == at[:, None])
    return BlockMask.from_kv_blocks(
        *_listed(some),
        *_listed(full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=tree_mask(reach),
        seq_lengths=(row.tokens, row.tokens),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many of each row of bool [n, n] are true, int32 [1, 1, n], and which, first in int32 [1, 1, n, n]."""
    order = torch.argsort(blocks.to(torch.int8), dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def mask_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float, flex: Callable[..., Any]
) -> Tensor:
    """Attention of a row [T, heads, d] under a block mask. `flex` is `flex_attention`, as it is or compiled."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out: Tensor = flex(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.size(1) != k.size(1))
    return out[0].transpose(0, 1)


@cache
def _compiled_flex() -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled


def segment_attention(query: Tensor, key: Tensor, value: Tensor, row: TreeRow, scale: float) -> Tensor:
    """Attention of a row on a CPU: [T, heads, d] to the same. Key and value heads may be fewer (grouped queries)."""
    out: Tensor = _SegmentAttention.apply(query, key, value, row, scale)  # type: ignore[no-untyped-call]
    return out


def _runs(lengths: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(start, count, length) of the causal calls to make."""
    runs, start = [], 0
    for length, same in groupby(lengths):
        count = len(list(same))
        if length <= _BATCHED_BELOW:
            runs.append((start, count, length))
        else:
            runs.extend((start + i * length, 1, length) for i in range(count))
        start += count * length
    return runs


def _rectangles(row: TreeRow) -> list[tuple[slice, slice]]:
    """(queries, keys) of every segment that has others below it."""
    found = []
    for start, length, end in zip(row.starts, row.lengths, row.ends, strict=True):
        if end > start + length:
            found.append((slice(start + length, end), slice(start, start + length)))
    return found


def _view(x: Tensor, start: int, count: int, length: int) -> Tensor:
    """[T, heads, d] to a view [count, heads, length, d] of `count` segments from `start`."""
    return x[start : start + count * length].view(count, length, *x.shape[1:]).transpose(1, 2)


def _part(x: Tensor, rows: slice) -> Tensor:
    """[T, heads, d] to a view [1, heads, n, d]."""
    return x[rows].transpose(0, 1)[None]


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, row: TreeRow, scale: float) -> Tensor:
        ctx.row, ctx.scale = row, scale
        out = torch.empty(q.shape, dtype=q.dtype)
        sums = torch.empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))  # log-sum-exp [T, heads]
        for run in _runs(row.lengths):
            one, logsumexp = _forward_cpu(_view(q, *run), _view(k, *run), _view(v, *run), 0.0, True, scale=scale)
            _view(out, *run).copy_(one)
            _view(sums[..., None], *run).copy_(logsumexp[..., None])
        for rows, keys in _rectangles(row):
            one, logsumexp = _forward_cpu(_part(q, rows), _part(k, keys), _part(v, keys), 0.0, False, scale=scale)
            before, more = sums[rows], logsumexp[0].transpose(0, 1)
            joint = torch.logaddexp(before, more)
            out[rows] *= (before - joint).exp_()[..., None].to(q.dtype)
            out[rows].addcmul_(one[0].transpose(0, 1), (more - joint).exp_()[..., None].to(q.dtype))
            before.copy_(joint)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        for run in _runs(ctx.row.lengths):
            views = (_view(x, *run) for x in (grad, q, k, v, out))
            logsumexp = _view(sums[..., None], *run)[..., 0]
            parts = _backward_cpu(*views, logsumexp, 0.0, True, scale=ctx.scale)
            for whole, part in zip((dq, dk, dv), parts, strict=True):
                _view(whole, *run).copy_(part)
        for rows, keys in _rectangles(ctx.row):
            views = (_part(x, y) for x, y in ((grad, rows), (q, rows), (k, keys), (v, keys), (out, rows)))
            logsumexp = sums[rows].t()[None]
            parts = _backward_cpu(*views, logsumexp, 0.0, False, scale=ctx.scale)
            for whole, part, where in zip((dq, dk, dv), parts, (rows, keys, keys), strict=True):
                whole[where] += part[0].transpose(0, 1)
        return dq, dk, dv, None, None
