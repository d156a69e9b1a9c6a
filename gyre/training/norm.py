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


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = (torch.linalg.vecdot(x, x) / x.size(-1)).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(x, scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        grad_weight = (grads[0] * normed).flatten(0, -2).sum(0)
        grad = grads[0] * weight
        along = torch.linalg.vecdot(grad, normed).div_(x.size(-1)).unsqueeze(-1)
        return grad.addcmul_(normed, along, value=-1).mul_(scale), grad_weight, None
