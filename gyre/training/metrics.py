"""What a micro-batch and a step report: sums that add up over micro-batches, and the figures made from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gyre.objective.gspo import GspoResult


@dataclass
class MicroBatchMetrics:
    """One micro-batch. Log-probs in nats; `difference` is trainer's minus sampler's log-prob of a target."""

    tokens: int
    """Tokens computed: what branches share, once."""
    branch_tokens: int
    """What its branches would have been apart."""
    n_targets: int
    seconds: float
    loss: float
    """Its part of R times the step's loss."""
    abs_difference_sum: float
    abs_difference_max: float
    entropy_sum: float
    ratio_sum: float
    """Over units: branches, or rollouts under objective.ratio = 'rollout'."""
    units: int
    clipped_targets: int
    """Targets whose gradient the clip took away."""
    clip_by_length: dict[str, list[int]] = field(default_factory=dict)
    """Targets of a unit, as a power of two they stay below -> [clipped units, units]."""

    def to_json(self) -> dict[str, Any]:
        """The sums, and beside them the figures a person reads."""
        return dataclasses.asdict(self) | self.figures()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> MicroBatchMetrics:
        """From what `to_json` gave; the figures are made again."""
        return cls(**{f.name: data[f.name] for f in dataclasses.fields(cls)})

    def figures(self) -> dict[str, float]:
        """Means over targets and units; zero where there are none."""
        n, units = max(self.n_targets, 1), max(self.units, 1)
        return {
            "mean_abs_logprob_diff": self.abs_difference_sum / n,
            "max_abs_logprob_diff": self.abs_difference_max,
            "mean_ratio": self.ratio_sum / units,
            "clip_fraction": self.clipped_targets / n,
            "entropy": self.entropy_sum / n,
            "tokens_per_s": self.tokens / self.seconds if self.seconds else 0.0,
        }


def measure(
    result: GspoResult, logprobs: Tensor, behaviour: Tensor, entropies: Tensor, *, tokens: int, branch_tokens: int
) -> MicroBatchMetrics:
    """Metrics of a micro-batch from its loss and log-probs [N]; its time is the caller's to add."""
    difference = (logprobs.detach() - behaviour.to(logprobs.dtype)).abs()
    by_length: dict[str, list[int]] = {}
    for count, clipped in zip(result.counts.tolist(), result.clipped.tolist(), strict=True):
        entry = by_length.setdefault(str(1 << int(count).bit_length()), [0, 0])
        entry[0] += int(clipped)
        entry[1] += 1
    return MicroBatchMetrics(
        tokens=tokens,
        branch_tokens=branch_tokens,
        n_targets=len(behaviour),
        seconds=0.0,
        loss=result.loss.item(),
        abs_difference_sum=difference.sum(dtype=torch.float64).item(),
        abs_difference_max=difference.max().item(),
        entropy_sum=entropies.sum(dtype=torch.float64).item(),
        ratio_sum=result.ratios.sum(dtype=torch.float64).item(),
        units=len(result.ratios),
        clipped_targets=int(result.counts[result.clipped].sum()),
        clip_by_length=by_length,
    )


def combine(parts: Iterable[MicroBatchMetrics]) -> MicroBatchMetrics:
    """Metrics of a whole step: sums add up, whichever trainers computed them; seconds are summed work."""
    total = MicroBatchMetrics(0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0)
    for part in parts:
        for name in ("tokens", "branch_tokens", "n_targets", "units", "clipped_targets"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        for name in ("seconds", "loss", "abs_difference_sum", "entropy_sum", "ratio_sum"):
            setattr(total, name, math.fsum((getattr(total, name), getattr(part, name))))
        total.abs_difference_max = max(total.abs_difference_max, part.abs_difference_max)
        for length, (clipped, count) in part.clip_by_length.items():
            entry = total.clip_by_length.setdefault(length, [0, 0])
            entry[0] += clipped
            entry[1] += count
    return total
