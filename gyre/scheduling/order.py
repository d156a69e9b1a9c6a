"""Which tasks a step takes: shuffled epochs, cut into steps."""

from __future__ import annotations

import random


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
