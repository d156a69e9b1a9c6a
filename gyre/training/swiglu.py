"""The gated activation of the MLP, silu(gate) * up, as one autograd node.

Megatron's unfused one is five passes over a row's widest tensors, and its backward as many and a concatenation. On a
CPU this one works through a few rows at a time, so that what passes write and read again stays in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CACHED = 1 << 16
"""Numbers of the input that are worked on at once on a CPU."""


class SwiGlu(torch.nn.Module):
    """[..., 2 F] (gate, then up) to [..., F]; in the place of Megatron's activation function (for the layer spec)."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _SwiGlu.apply(x)  # type: ignore[no-untyped-call]
        return out


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = torch.empty(*x.shape[:-1], x.size(-1) // 2, dtype=x.dtype, device=x.device)
        for rows, result in zip(_blocks(x), _blocks(out, x.size(-1)), strict=True):
            gate, up = rows.chunk(2, -1)
            torch.mul(F.silu(gate), up, out=result)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad = torch.empty_like(x)
        for rows, out, into in zip(_blocks(x), _blocks(grads[0], x.size(-1)), _blocks(grad), strict=True):
            (gate, up), (to_gate, to_up) = rows.chunk(2, -1), into.chunk(2, -1)
            torch.mul(out, F.silu(gate), out=to_up)
            torch.ops.aten.silu_backward.grad_input(out * up, gate, grad_input=to_gate)
        return grad


def _blocks(x: Tensor, width: int | None = None) -> tuple[Tensor, ...]:
    """`x` as [n, features] in pieces of so many rows that n * `width` numbers (None: its own) fit the cache."""
    flat = x.reshape(-1, x.size(-1))
    rows = max(1, _CACHED // (width or x.size(-1))) if x.device.type == "cpu" else max(1, len(flat))
    return torch.split(flat, rows)
