"""Presets after the published workloads.

What was published of them is the kind of model, the number of nodes and steps, and that the last one's rollouts often
run into the time limit. Speeds and lengths are ours, chosen once, written here, and the same for every policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gyre.simulation.model import CostModel, Scenario
from gyre.simulation.workload import Workload


@dataclass(frozen=True)
class Preset:
    """A cluster and a workload."""

    title: str
    cells: int
    n_steps: int
    cost: CostModel
    workload: Workload
    time_limit_s: float

    def scenario(self, seed: int = 0, n_steps: int | None = None) -> Scenario:
        """The preset's run; `n_steps` shortens or lengthens it."""
        rng = np.random.default_rng(seed)
        steps = [self.workload.step(rng) for _ in range(self.n_steps if n_steps is None else n_steps)]
        return Scenario(self.title, self.cells, self.cost, steps, self.time_limit_s)


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
