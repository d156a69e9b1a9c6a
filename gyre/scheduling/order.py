"""Which tasks a step takes: shuffled epochs, cut into steps; and which of them it launches first."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence


def step_tasks(n_tasks: int, seed: int, index: int, groups: int) -> list[int]:
    """Indices of the tasks of step `index` (0-based), `groups` of them, out of `n_tasks`.

    Epochs of all tasks, each shuffled by (seed, epoch), stand in one line and steps are cut from it; so every task
    comes once an epoch, and a step across the border of two epochs may hold a task twice. Raises ValueError without
    tasks.
    """
    if n_tasks < 1:
        raise ValueError("tasks.train: the folder holds no task")
    first = index * groups
    return [_epoch(n_tasks, seed, k // n_tasks)[k % n_tasks] for k in range(first, first + groups)]


def _epoch(n_tasks: int, seed: int, epoch: int) -> list[int]:
    order = list(range(n_tasks))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


UNKNOWN = 0.9
"""The part of the known groups that come after one of which nothing is known."""


def longest_first(expected_s: Sequence[float | None]) -> list[int]:
    """Indices of a step's groups in the order of their launch: who is expected to take longest comes first.

    A step ends with the last of its groups, and one that is both long and late ends after all others; short ones fill
    what the long ones leave (Graham's LPT rule). `expected_s`: seconds that a rollout of each group is expected to
    take; None where nothing is known. Such a group may be long, and a long one that starts late costs more than a short
    one that starts early, so it stands before all but the longest tenth of the known ones (UNKNOWN). Equal ones keep
    their order: where nothing is known, nothing moves.
    """
    known = sorted(seconds for seconds in expected_s if seconds is not None)
    unknown = known[math.ceil(UNKNOWN * len(known)) - 1] if known else 0.0
    seconds = [unknown if s is None else s for s in expected_s]
    return sorted(range(len(seconds)), key=lambda i: -seconds[i])
