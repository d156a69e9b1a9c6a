"""Estimators of KL(pi || ref) from sampled tokens (Schulman, "Approximating KL divergence", 2020), as a loss term.

With d = log pi - log ref of a sampled token:

    k1 = d                    unbiased, but as a loss its expected gradient is zero: it adds only noise
    k2 = d^2 / 2              biased in value; on-policy its gradient is exactly that of the KL
    k3 = exp(-d) - 1 + d      unbiased, never negative; its gradient is that of KL(ref || pi)

All three are expectations over pi. The tokens here were sampled by the behaviour policy, so a difference between the
two biases them; that is what other systems do, too (TRL, verl).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def kl_terms(estimator: Estimator, logprobs: Tensor, reference: Tensor) -> Tensor:
    """[N], in nats: one term a target, differentiable in `logprobs` [N]; `reference` [N] are constants."""
    d = logprobs - reference.to(logprobs.dtype)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2
    return torch.expm1(-d) + d
