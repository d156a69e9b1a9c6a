"""Group-relative advantages: one reward a rollout, whatever the number of its branches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

_EQUAL = 1e-9
_EPS = 1e-6

Outcome = Literal["trained", "no_variance", "low_variance", "too_few_valid"]


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of one group, by member.

    `baseline` is the mean of the valid rewards and `std` their population standard deviation (None: no valid one).
    `advantages` has None for every member without a valid reward, and for all members unless `outcome` is `trained`.
    """

    baseline: float | None
    std: float | None
    advantages: list[float | None]
    outcome: Outcome


def group_advantages(rewards: Sequence[float | None], normalize_std: bool, min_std: float = 0.0) -> GroupAdvantages:
    """`A_i = r_i - mean(r)`, divided by `std(r) + 1e-6` when `normalize_std` (GRPO, Shao et al. 2024, sec. 4.1).

    `rewards` has one entry a member; None is an excluded member, which counts in neither mean nor deviation. No
    gradient comes from fewer than two valid rewards, from rewards all within 1e-9, and from a standard deviation below
    `min_std`. With normalisation |A| is below sqrt(n - 1) for n valid members. Raises ValueError for a reward that is
    not finite.
    """
    valid = [r for r in rewards if r is not None]
    if bad := [r for r in valid if not math.isfinite(r)]:
        raise ValueError(f"rewards: {bad[0]!r} is not finite; a failed evaluation must be None")
    nothing: list[float | None] = [None] * len(rewards)
    if not valid:
        return GroupAdvantages(None, None, nothing, "too_few_valid")
    array = np.asarray(valid, dtype=np.float64)
    baseline, std = float(array.mean()), float(array.std())
    if len(valid) < 2:
        return GroupAdvantages(baseline, std, nothing, "too_few_valid")
    if array.max() - array.min() <= _EQUAL:
        return GroupAdvantages(baseline, std, nothing, "no_variance")
    if std < min_std:
        return GroupAdvantages(baseline, std, nothing, "low_variance")
    scale = std + _EPS if normalize_std else 1.0
    return GroupAdvantages(baseline, std, [None if r is None else (r - baseline) / scale for r in rewards], "trained")
