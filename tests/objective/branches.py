"""Branches of rollouts as numbers, their loss by Gyre, and the published formulas written out one token at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gyre.config import ObjectiveConfig
from gyre.objective import LossResult, Targets, divisor, policy_loss, target_weight


@dataclass(frozen=True)
class Branch:
    """The owned tokens of one branch: log-probs now and under the sampler."""

    rollout: int
    logp: np.ndarray
    mu: np.ndarray
    advantage: float


def random_branches(rng: np.random.Generator, rollouts: int = 6, most: int = 4, spread: float = 0.02) -> list[Branch]:
    branches = []
    for rollout in range(rollouts):
        advantage = float(rng.normal())
        for n in rng.integers(1, 30, rng.integers(1, most + 1)):
            mu = -rng.exponential(1.0, n)
            branches.append(Branch(rollout, mu + rng.normal(0, spread, n), mu, advantage))
    return branches


def rollout_targets(branches: Sequence[Branch]) -> dict[int, int]:
    """N_r."""
    totals: dict[int, int] = {}
    for b in branches:
        totals[b.rollout] = totals.get(b.rollout, 0) + len(b.mu)
    return totals


def ours(
    branches: Sequence[Branch],
    config: ObjectiveConfig,
    *,
    totals: dict[int, int] | None = None,
    reference: np.ndarray | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[LossResult, np.ndarray]:
    """The result of one micro-batch (D times its part of the loss) and its gradient by log-prob, in order."""
    totals = totals or rollout_targets(branches)
    names = [b.rollout if config.ratio == "rollout" else i for i, b in enumerate(branches)]
    order = list(dict.fromkeys(names))
    firsts = [branches[names.index(n)] for n in order]
    logp = torch.tensor(np.concatenate([b.logp for b in branches]), dtype=dtype, requires_grad=True)
    targets = Targets(
        behaviour=torch.tensor(np.concatenate([b.mu for b in branches]), dtype=dtype),
        sequence=torch.tensor(np.repeat([order.index(n) for n in names], [len(b.mu) for b in branches])),
        advantage=torch.tensor([b.advantage for b in firsts], dtype=dtype),
        weight=torch.tensor([target_weight(config, totals[b.rollout]) for b in firsts], dtype=dtype),
        reference=None if reference is None else torch.tensor(reference, dtype=dtype),
    )
    result = policy_loss(logp, targets, config)
    result.loss.backward()
    assert logp.grad is not None
    return result, logp.grad.numpy()


def step(branches: Sequence[Branch], config: ObjectiveConfig, **options: Any) -> tuple[float, np.ndarray]:
    """L of a step that consists of these branches, and its gradient."""
    result, gradient = ours(branches, config, **options)
    totals = rollout_targets(branches)
    d = divisor(config, len(totals), sum(totals.values()))
    return result.loss.item() / d, gradient / d


def published(branches: Sequence[Branch], config: ObjectiveConfig) -> tuple[float, np.ndarray]:
    """Loss and gradient by log-prob, from the papers' formulas in plain Python (they maximise: hence the minus).

    GSPO 2507.18071: (1/G) sum_i (1/|o_i|) sum_t min(s_it A, clip(s_it) A), s_i = (prod of ratios)^(1/|y_i|)
    GRPO 2402.03300: (1/G) sum_i (1/|o_i|) sum_t min(r_it A, clip(r_it) A)
    DAPO 2503.14476: (1 / sum_i |o_i|) sum_i sum_t min(r_it A, clip(r_it) A)
    Where the clip is not the minimum, the gradient by log pi_t is the ratio times A.
    """
    outputs: dict[int, list[int]] = {}
    for i, b in enumerate(branches):
        outputs.setdefault(b.rollout, []).append(i)
    total = sum(len(b.mu) for b in branches)
    objective = 0.0
    gradients = [[0.0] * len(b.mu) for b in branches]
    for members in outputs.values():
        length = sum(len(branches[i].mu) for i in members)
        for i in members:
            b = branches[i]
            same = members if config.ratio == "rollout" else [i]
            product, n = 0.0, 0
            for j in same:
                for new, old in zip(branches[j].logp, branches[j].mu, strict=True):
                    product += math.log(math.exp(new) / math.exp(old))
                    n += 1
            for t in range(len(b.mu)):
                ratio = math.exp(b.logp[t]) / math.exp(b.mu[t])
                if config.algorithm == "gspo":
                    ratio = math.exp(product) ** (1 / n)
                clipped = max(1 - config.clip_low, min(1 + config.clip_high, ratio))
                share = 1 / total if config.algorithm == "dapo" else 1 / length / len(outputs)
                objective += share * min(ratio * b.advantage, clipped * b.advantage)
                if ratio * b.advantage <= clipped * b.advantage:
                    gradients[i][t] = -share * ratio * b.advantage
    return -objective, np.concatenate(gradients)
