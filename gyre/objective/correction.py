"""Corrections of the difference between the policy that sampled and the one that is trained.

The importance weight of a target is w = pi / mu: trainer's probability over sampler's, of the token itself or, by
`objective.correction_level = "sequence"`, the geometric mean over its sequence (a product over 1e5 tokens says
nothing). pi is the trainer's policy at the moment of training. So at staleness 0, w is the mismatch of the two
engines alone; otherwise it holds the policy's own movement since sampling, too: what the trainer would have computed
at the sampling version is not recorded.

truncate (TIS; Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025): each loss
term is multiplied by min(w, cap).

mask (MIS; Liu et al., "When Speed Kills Stability", 2025): targets with w outside [floor, cap] give nothing to the
loss. Denominators stay: N_r, R and the step's targets are fixed before anything is rejected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gyre.config import ObjectiveConfig
from gyre.objective.sequences import Sequences


@dataclass(frozen=True)
class Correction:
    """`factor` [N]: what multiplies each loss term (0 where rejected). `kept`, `truncated` bool [N]."""

    factor: Tensor
    kept: Tensor
    truncated: Tensor


def correct(log_ratio: Tensor, sequences: Sequences, config: ObjectiveConfig) -> Correction:
    """The correction of targets whose log pi - log mu is `log_ratio` [N], without gradient.

    With `objective.old = "sampler"` the loss's own ratio carries w already, and factors are 1 or 0.
    """
    yes = torch.ones_like(log_ratio, dtype=torch.bool)
    one = torch.ones_like(log_ratio)
    if config.correction == "none":
        return Correction(one, yes, ~yes)
    if config.correction_level == "sequence":
        log_ratio = sequences.spread(sequences.mean(log_ratio))
    weight = log_ratio.exp()
    over = weight > config.correction_cap
    if config.correction == "truncate":
        return Correction(weight.clamp(max=config.correction_cap), yes, over)
    kept = ~over & (weight >= config.correction_floor)
    carried = weight if config.old == "trainer" else one
    return Correction(torch.where(kept, carried, torch.zeros_like(carried)), kept, ~yes)
