"""What a micro-batch and a step report: sums that add up over micro-batches, and the figures made from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gyre.objective import LossResult


@dataclass
class MicroBatchMetrics:
    """One micro-batch. Log-probs in nats; `difference` is trainer's minus sampler's log-prob of a target."""

    tokens: int = 0
    """That the model computed: every distinct one of a row once."""
    branch_tokens: int = 0
    """The same branches' tokens one branch after another, with nothing shared."""
    n_targets: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    """Its part of the step's loss times its divisor."""
    abs_difference_sum: float = 0.0
    abs_difference_max: float = 0.0
    mismatch_k1_sum: float = 0.0
    """Of -difference: each an estimate of KL(sampler || trainer)."""
    mismatch_k3_sum: float = 0.0
    """Of exp(difference) - 1 - difference: the same, never negative."""
    entropy_sum: float = 0.0
    sequences: int = 0
    """Branches, or rollouts under objective.ratio = 'rollout'."""
    ratio_sum: float = 0.0
    """Of sequences' length-normalised ratios of trainer to sampler, whichever ratio the loss uses."""
    ratio_min: float = math.inf
    ratio_max: float = -math.inf
    clipped_targets: int = 0
    """Targets whose gradient the clip took away."""
    rejected_targets: int = 0
    """Targets that objective.correction = 'mask' took out."""
    truncated_targets: int = 0
    """Targets whose weight objective.correction = 'truncate' cut to the cap."""
    kl_sum: float = 0.0
    """Of the penalty of objective.kl, before its coefficient."""
    clip_by_length: dict[str, list[int]] = field(default_factory=dict)
    """Targets of a sequence, as a power of two they stay below -> [clipped targets, targets]."""
    rejected_by_node: dict[str, int] = field(default_factory=dict)
    """Of a micro-batch only: row of a node -> its rejected targets (the view token_accounting reads it)."""
    nonfinite: int = 0
    """Sums and extremes of micro-batches that are not finite: a ratio of which a target is rejected may overflow."""

    def to_json(self) -> dict[str, Any]:
        """The sums, and beside them the figures a person reads. What is not finite is null: JSON has no word for it.

        The extremes of no sequence are left out.
        """
        data = dataclasses.asdict(self)
        if not self.sequences:
            del data["ratio_min"], data["ratio_max"]
        return {k: None if _not_finite(v) else v for k, v in (data | self.figures()).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> MicroBatchMetrics:
        """From what `to_json` gave, null as NaN; the figures are made again."""
        known = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data}
        values: dict[str, Any] = {name: math.nan if value is None else value for name, value in known.items()}
        return cls(**values)

    def figures(self) -> dict[str, float]:
        """Means over targets and sequences; zero where there are none."""
        n, sequences = max(self.n_targets, 1), max(self.sequences, 1)
        return {
            "mean_abs_logprob_diff": self.abs_difference_sum / n,
            "max_abs_logprob_diff": self.abs_difference_max,
            "mismatch_kl": self.mismatch_k3_sum / n,
            "mean_ratio": self.ratio_sum / sequences,
            "clip_fraction": self.clipped_targets / n,
            "rejected_fraction": self.rejected_targets / n,
            "truncated_fraction": self.truncated_targets / n,
            "kl": self.kl_sum / n,
            "entropy": self.entropy_sum / n,
            "tokens_per_s": self.tokens / self.seconds if self.seconds else 0.0,
        }


def measure(
    result: LossResult,
    logprobs: Tensor,
    behaviour: Tensor,
    entropies: Tensor,
    *,
    tokens: int,
    branch_tokens: int = 0,
    seconds: float = 0.0,
    nodes: NDArray[np.int64] | None = None,
) -> MicroBatchMetrics:
    """Metrics of a micro-batch from its loss and log-probs [N]; `nodes` [N] are the rows of its targets' nodes."""
    difference = logprobs.detach().double() - behaviour.double()
    absolute = difference.abs()
    clipped = torch.bincount(result.sequence[result.clipped], minlength=len(result.counts))
    by_length: dict[str, list[int]] = {}
    for count, gone in zip(result.counts.tolist(), clipped.tolist(), strict=True):
        entry = by_length.setdefault(str(1 << int(count).bit_length()), [0, 0])
        entry[0] += int(gone)
        entry[1] += int(count)
    metrics = MicroBatchMetrics(
        tokens=tokens,
        branch_tokens=branch_tokens,
        n_targets=len(behaviour),
        seconds=seconds,
        loss=result.loss.item(),
        abs_difference_sum=absolute.sum().item(),
        abs_difference_max=absolute.max().item(),
        mismatch_k1_sum=-difference.sum().item(),
        mismatch_k3_sum=(torch.expm1(difference) - difference).sum().item(),
        entropy_sum=entropies.sum(dtype=torch.float64).item(),
        sequences=len(result.ratios),
        ratio_sum=result.ratios.sum(dtype=torch.float64).item(),
        ratio_min=result.ratios.min().item(),
        ratio_max=result.ratios.max().item(),
        clipped_targets=int(result.clipped.sum()),
        rejected_targets=int((~result.kept).sum()),
        truncated_targets=int(result.truncated.sum()),
        kl_sum=result.kl.sum(dtype=torch.float64).item(),
        clip_by_length=by_length,
        rejected_by_node={} if nodes is None else _count(nodes[(~result.kept).cpu().numpy()]),
    )
    metrics.nonfinite = sum(map(_not_finite, dataclasses.asdict(metrics).values()))
    return metrics


def _not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _count(nodes: NDArray[np.int64]) -> dict[str, int]:
    found, counts = np.unique(nodes, return_counts=True)
    return {str(node): int(n) for node, n in zip(found.tolist(), counts.tolist(), strict=True)}


_COUNTS = (
    "tokens", "branch_tokens", "n_targets", "sequences", "clipped_targets", "rejected_targets", "truncated_targets",
    "nonfinite",
)  # fmt: skip
_SUMS = (
    "seconds", "loss", "abs_difference_sum", "mismatch_k1_sum", "mismatch_k3_sum", "entropy_sum", "ratio_sum", "kl_sum",
)  # fmt: skip


def combine(parts: Iterable[MicroBatchMetrics]) -> MicroBatchMetrics:
    """Metrics of a whole step: sums add up, whichever trainers computed them; seconds are summed work."""
    total = MicroBatchMetrics()
    for part in parts:
        for name in _COUNTS:
            setattr(total, name, getattr(total, name) + getattr(part, name))
        for name in _SUMS:
            setattr(total, name, getattr(total, name) + getattr(part, name))
        # Those of NumPy, unlike Python's, keep a NaN whichever side it is on.
        total.abs_difference_max = float(np.maximum(total.abs_difference_max, part.abs_difference_max))
        total.ratio_min = float(np.minimum(total.ratio_min, part.ratio_min))
        total.ratio_max = float(np.maximum(total.ratio_max, part.ratio_max))
        for length, (clipped, count) in part.clip_by_length.items():
            entry = total.clip_by_length.setdefault(length, [0, 0])
            entry[0] += clipped
            entry[1] += count
    return total
