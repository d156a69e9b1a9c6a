"""Sums over sequences: a sequence is one branch's owned tokens, or all those of one rollout (`objective.ratio`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """Which of U sequences each of N targets belongs to. `of` int64 [N], 0..U-1; `counts` [U], all at least 1."""

    of: Tensor
    counts: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """[N] to [U]: the mean of each sequence's values."""
        zero = torch.zeros(len(self.counts), dtype=values.dtype, device=values.device)
        return zero.index_add_(0, self.of, values) / self.counts

    def spread(self, values: Tensor) -> Tensor:
        """[U] to [N]: each target gets its sequence's value."""
        return values[self.of]


def sequences(of: Tensor, number: int) -> Sequences:
    """Checked: raises ValueError where one of the `number` sequences has no target, or a target has no sequence."""
    if len(of) and not 0 <= int(of.min()) <= int(of.max()) < number:
        raise ValueError(f"sequence: must be in 0..{number - 1}, got {int(of.min())}..{int(of.max())}")
    counts = torch.bincount(of, minlength=number)
    if (counts == 0).any():
        raise ValueError(
            f"sequence: every one of the {number} sequences needs at least one target, got counts {counts.tolist()}"
        )
    return Sequences(of, counts)
