"""One micro-batch's part of a step's loss, whichever the algorithm.

For a target t of rollout r, with mu the policy that sampled it and pi the one that is trained:

    rho_t = the algorithm's ratio of pi to pi_old                            no gradient
    l_t   = -min( rho_t p A, clip(rho_t p, 1 - low, 1 + high) A )            p = pi_t / sg[pi_t], which is 1
    L     = (1/D) sum_t w_r ( c_t l_t + k_t beta KL_t )

c_t and k_t are the correction's factor and its 0 or 1 (`gyre.objective.correction`), beta KL_t the penalty
(`gyre.objective.kl`). Averaged over rollouts: w_r = 1 / N_r and D = R. Averaged over tokens (dapo): w_r = 1 and
D = sum_r N_r. What is computed here is D * L over a micro-batch: D is known when the step closes and divides once.

What is "old". A rollout is trained once, in one optimizer step; there are no several passes over a batch. So the usual
pi_old, the trainer's policy before the first of them, is pi itself:

    old = "sampler"   pi_old is mu. The ratio holds the engines' mismatch and, off-policy, the movement since sampling;
                      the clip bounds both.
    old = "trainer"   pi_old is sg[pi]. The ratio is 1 and the clip never acts: a policy gradient, which the correction
                      weighs by pi / mu (truncated or masked). Without a correction the difference is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gyre.config import ObjectiveConfig
from gyre.objective.algorithm import ALGORITHMS
from gyre.objective.correction import correct
from gyre.objective.kl import kl_terms
from gyre.objective.sequences import sequences


@dataclass(frozen=True)
class Targets:
    """The targets of a micro-batch, N tokens in U sequences: constants of the data.

    `behaviour` [N]: log-probs under the policy that sampled, at the temperature of sampling. `sequence` int64 [N]: the
    sequence of each target, 0..U-1, each with at least one target. `advantage` [U]. `weight` [U]: `target_weight`.
    `reference` [N]: log-probs under the frozen reference policy, where `objective.kl_reference` asks for one.
    """

    behaviour: Tensor
    sequence: Tensor
    advantage: Tensor
    weight: Tensor
    reference: Tensor | None = None


@dataclass(frozen=True)
class LossResult:
    """`loss`: a differentiable scalar. The rest is without gradient.

    `ratios` [U]: length-normalised ratio pi / mu of each sequence. `counts` [U]: its targets. `sequence` [N]: as given.
    Of each target [N]: `clipped`, the clip takes its gradient away; `kept`, the correction's mask left it in;
    `truncated`, its weight was cut to the cap; `kl`, its penalty before the coefficient (0 without one).
    """

    loss: Tensor
    ratios: Tensor
    counts: Tensor
    sequence: Tensor
    clipped: Tensor
    kept: Tensor
    truncated: Tensor
    kl: Tensor


def target_weight(config: ObjectiveConfig, rollout_targets: int) -> float:
    """w_r of a rollout with N_r = `rollout_targets`."""
    return 1.0 if ALGORITHMS[config.algorithm].token_mean else 1.0 / rollout_targets


def divisor(config: ObjectiveConfig, rollouts: int, targets: int) -> int:
    """D of a step with R = `rollouts` and `targets` over all its samples."""
    return targets if ALGORITHMS[config.algorithm].token_mean else rollouts


def policy_loss(logprobs: Tensor, targets: Targets, config: ObjectiveConfig) -> LossResult:
    """D * L of `targets` under the policy whose log-probs [N] are `logprobs`, in their dtype.

    Raises ValueError for shapes that do not fit, a sequence without targets, or a reference that is missing.
    """
    _check(logprobs, targets, config)
    seqs = sequences(targets.sequence, len(targets.advantage))
    frozen = logprobs.detach()
    behaviour = targets.behaviour.to(frozen.dtype)
    difference = frozen - behaviour
    correction = correct(difference, seqs, config)

    ratio = ALGORITHMS[config.algorithm].ratios(difference if config.old == "sampler" else frozen - frozen, seqs)
    # A rejected target's ratio may be anything, infinity included, and its factor of 0 must make it nothing.
    ratio = torch.where(correction.kept, ratio, torch.ones_like(ratio)) * (logprobs - frozen).exp()
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    advantage, weight = (seqs.spread(x.to(frozen.dtype)) for x in (targets.advantage, targets.weight))
    losses = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage) * correction.factor
    kl = torch.zeros_like(frozen)
    if config.kl != "none":
        reference = behaviour if config.kl_reference == "sampler" else targets.reference
        assert reference is not None
        # The same for the penalty: where, and not a product with 0, keeps infinities out of the gradient's sum.
        terms = kl_terms(config.kl, torch.where(correction.kept, logprobs, frozen), reference)
        terms = torch.where(correction.kept, terms, torch.zeros_like(terms))
        losses = losses + config.kl_coefficient * terms
        kl = terms.detach()
    value = ratio.detach()
    outside = torch.where(advantage > 0, value > high, value < low)
    return LossResult(
        loss=(losses * weight).sum(),
        ratios=seqs.mean(difference).exp(),
        counts=seqs.counts,
        sequence=targets.sequence,
        clipped=outside & (advantage != 0),
        kept=correction.kept,
        truncated=correction.truncated,
        kl=kl,
    )


def _check(logprobs: Tensor, targets: Targets, config: ObjectiveConfig) -> None:
    n, u = len(logprobs), len(targets.advantage)
    for name, tensor, size in (
        ("behaviour", targets.behaviour, n),
        ("sequence", targets.sequence, n),
        ("weight", targets.weight, u),
        ("reference", targets.reference, n),
    ):
        if tensor is not None and tensor.shape != (size,):
            raise ValueError(f"{name}: expected shape {(size,)}, got {tuple(tensor.shape)}")
    if config.kl != "none" and config.kl_reference != "sampler" and targets.reference is None:
        raise ValueError(f"objective.kl_reference = {config.kl_reference!r} needs the reference policy's log-probs")
