"""RMS norm as one autograd node with a hand-written backward: torch's own is a chain of seven on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RmsNorm(torch.nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, in at least float32 (for the layer spec)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        out: Tensor = _RmsNorm.apply(x.to(wide), self.weight.to(wide), self.eps)  # type: ignore[no-untyped-call]
        return out.to(x.dtype)


_CACHED = 1 << 16
"""Numbers that are worked on at once on a CPU, so that what one pass writes and the next reads stays in the cache."""


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        scale = torch.empty(*x.shape[:-1], 1, dtype=x.dtype, device=x.device)
        rows = _rows(x)
        for part, result, factor in zip(*(torch.split(t, rows) for t in (x, out, scale)), strict=True):
            factor.copy_((torch.linalg.vecdot(part, part) / x.size(-1)).add_(eps).rsqrt_().unsqueeze(-1))
            torch.mul(part, factor, out=result).mul_(weight)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        grad_weight = torch.zeros_like(weight)
        rows = _rows(x)
        for part, factor, out, into in zip(*(torch.split(t, rows) for t in (x, scale, grads[0], grad)), strict=True):
            normed = part * factor
            grad_weight += (out * normed).flatten(0, -2).sum(0)
            torch.mul(out, weight, out=into)
            along = torch.linalg.vecdot(into, normed).div_(x.size(-1)).unsqueeze(-1)
            into.addcmul_(normed, along, value=-1).mul_(factor)
        return grad, grad_weight, None


def _rows(x: Tensor) -> int:
    """How many of the first dimension's rows to take at once."""
    return max(1, _CACHED * len(x) // max(1, x.numel())) if x.device.type == "cpu" else max(1, len(x))
