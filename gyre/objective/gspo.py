"""GSPO-token (Zheng et al., "Group Sequence Policy Optimization", 2025, eq. 11 and 13-14), with a step's denominators.

For a unit i (one branch's owned tokens, or all those of one rollout) with targets t = 1..n:

    s_i   = exp( (1/n) sum_t (logp_t - logp_old_t) )                      eq. 7, the length-normalised sequence ratio
    s_i,t = sg[s_i] * exp(logp_t) / sg[exp(logp_t)]                        eq. 14, sg: no gradient
    l_t   = -min( s_i,t A, clip(s_i,t, 1 - clip_low, 1 + clip_high) A )    eq. 13, A the advantage of the rollout

A step's loss is L = (1/R) sum_r (1/N_r) sum_t l_t, R the rollouts with a valid reward, N_r the targets of rollout r
over all its samples. What is computed here is one micro-batch's part of R * L: 1/R comes once, when the step ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GspoTargets:
    """The targets of a micro-batch, N tokens in U units. All but `behaviour` are constants of the data.

    `behaviour` [N]: log-probs under the policy that sampled, at the temperature of sampling. `unit` int64 [N]: the unit
    of each target, 0..U-1, each with at least one target. `advantage` [U]. `weight` [U]: 1 / N_r of its rollout.
    """

    behaviour: Tensor
    unit: Tensor
    advantage: Tensor
    weight: Tensor


@dataclass(frozen=True)
class GspoResult:
    """`loss`: a differentiable scalar, sum_t weight * l_t. `ratios` [U]: s_i. `clipped` bool [U]: the clip is active
    and takes the gradient away. `counts` [U]: targets of each unit. All but `loss` carry no gradient."""

    loss: Tensor
    ratios: Tensor
    clipped: Tensor
    counts: Tensor


def gspo_token_loss(logprobs: Tensor, targets: GspoTargets, clip_low: float, clip_high: float) -> GspoResult:
    """The loss of `targets` under the policy whose log-probs [N] are `logprobs`, in their dtype.

    Raises ValueError for shapes that do not fit or a unit without targets.
    """
    units = len(targets.advantage)
    for name, tensor, size in (
        ("behaviour", targets.behaviour, len(logprobs)),
        ("unit", targets.unit, len(logprobs)),
        ("weight", targets.weight, units),
    ):
        if tensor.shape != (size,):
            raise ValueError(f"{name}: expected shape {(size,)}, got {tuple(tensor.shape)}")
    counts = torch.bincount(targets.unit, minlength=units)
    if len(counts) != units or (counts == 0).any():
        raise ValueError(
            f"unit: every one of the {units} units needs at least one target, got counts {counts.tolist()}"
        )

    frozen = logprobs.detach()
    difference = frozen - targets.behaviour.to(frozen.dtype)
    mean = torch.zeros(units, dtype=frozen.dtype, device=frozen.device).index_add_(0, targets.unit, difference) / counts
    ratios = mean.exp()
    advantage, weight = (x.to(frozen.dtype)[targets.unit] for x in (targets.advantage, targets.weight))
    ratio = ratios[targets.unit] * (logprobs - frozen).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -(torch.minimum(ratio * advantage, clipped * advantage) * weight).sum()
    outside = torch.where(targets.advantage > 0, ratios > 1.0 + clip_high, ratios < 1.0 - clip_low)
    return GspoResult(loss, ratios, outside & (targets.advantage != 0), counts)
