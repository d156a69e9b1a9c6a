"""Presets after the published workloads.

What was published of them is the kind of model, the number of nodes and steps, and that the last one's rollouts often
run into the time limit. Speeds and lengths are ours, chosen once, written here, and the same for every policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from gyre.scheduling import longest_first
from gyre.simulation.model import CostModel, Scenario, StepWork
from gyre.simulation.workload import Workload

Order = Literal["shuffled", "longest_first", "oracle"]
"""In which order a step's groups are launched: as they were drawn; by the mean seconds that the same tasks took an
epoch before (`rollouts.order`); by the mean seconds that they are going to take, which nobody knows."""


@dataclass(frozen=True)
class Preset:
    """A cluster and a workload."""

    title: str
    cells: int
    n_steps: int
    cost: CostModel
    workload: Workload
    time_limit_s: float

    def scenario(
        self, seed: int = 0, n_steps: int | None = None, order: Order = "shuffled", over_submit: int = 0
    ) -> Scenario:
        """The preset's run; `n_steps` shortens or lengthens it. Its work is the same in every order, and with
        `over_submit` that many members more in each group."""
        rng, epoch_before = np.random.default_rng(seed), np.random.default_rng([seed, 1])
        spare = [np.random.default_rng([seed, 2, member]) for member in range(over_submit)]
        n = self.n_steps if n_steps is None else n_steps
        steps = [self._step(rng, epoch_before, spare, order) for _ in range(n)]
        return Scenario(self.title, self.cells, self.cost, steps, self.time_limit_s, over_submit=over_submit)

    def _step(
        self, rng: np.random.Generator, epoch_before: np.random.Generator, spare: Sequence[np.random.Generator],
        order: Order,
    ) -> StepWork:  # fmt: skip
        tasks = self.workload.tasks(rng)
        work = self.workload.rollouts(tasks, rng)
        groups = list(range(len(work.tokens)))
        if order != "shuffled":
            known = work if order == "oracle" else self.workload.rollouts(tasks, epoch_before)
            seconds = known.seconds(self.cost.token_s(self.cost.slots), self.time_limit_s)
            groups = longest_first(seconds.mean(axis=1).tolist())
        for member in spare:
            work = work.beside(replace(self.workload, group_size=1).rollouts(tasks, member))
        return work.in_order(groups)


_122B = CostModel(
    slots=40,
    decode_s=0.012,
    decode_s_per_rollout=0.00045,
    prefill_tokens_s=60_000,
    train_tokens_s=9_000,
    micro_batch_tokens=262_144,
    to_train_s=20.0,
    to_rollout_s=25.0,
    optimizer_s=30.0,
)
_2T4 = CostModel(
    slots=96,
    decode_s=0.025,
    decode_s_per_rollout=0.0004,
    prefill_tokens_s=90_000,
    train_tokens_s=16_000,
    micro_batch_tokens=1_048_576,
    to_train_s=60.0,
    to_rollout_s=75.0,
    optimizer_s=120.0,
)

PRESETS: dict[str, Preset] = {
    "nl2repo": Preset(
        "122B, 24 nodes, NL2RepoBench", 6, 48, _122B,
        Workload(32, 16, 45_000, 600.0, 120_000, 0.45, 0.45, 4.0), 3 * 3600.0,
    ),
    "deepswe": Preset(
        "122B, 32 nodes, DeepSWE", 8, 24, _122B,
        Workload(48, 16, 25_000, 500.0, 90_000, 0.4, 0.45, 4.0), 2 * 3600.0,
    ),
    "terminal": Preset(
        "122B, 24 nodes, TerminalBench", 6, 24, _122B,
        Workload(48, 16, 14_000, 400.0, 50_000, 0.5, 0.5, 4.0), 1.5 * 3600.0,
    ),
    "terminal-tail": Preset(
        "122B, 32 nodes, TerminalBench, heaviest tail", 8, 24, _122B,
        Workload(64, 16, 14_000, 350.0, 50_000, 0.7, 0.8, 4.0, hung=0.005), 3 * 3600.0,
    ),
    "2.4t": Preset(
        "2.4T, 192 nodes, rollouts at the time limit", 4, 24, _2T4,
        Workload(32, 16, 40_000, 1800.0, 150_000, 0.5, 0.6, 4.0, hung=0.10), 4 * 3600.0,
    ),
    "10k-nodes": Preset(
        "10,000 nodes in cells of 48", 208, 48, _2T4,
        Workload(1024, 16, 30_000, 900.0, 80_000, 0.5, 0.6, 4.0, hung=0.02), 3 * 3600.0,
    ),
}  # fmt: skip
