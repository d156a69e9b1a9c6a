"""`python -m benchmarks.elastic.expected [--steps N] [--seeds N]`: what the simulator expects of the paced form.

The bench's own work under its policies, without the control plane's latencies, over seeds that a live bench has no time
for: how much faster elastic at staleness 1 is.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

from benchmarks.elastic.__main__ import DECIDE_S, ROLLOUTS_PER_SLOT
from benchmarks.elastic.paced import CONTEXT, SLACK
from benchmarks.elastic.workload import make_work, scaled_groups, scenario_of
from gyre.scheduling import AsyncPolicy, ColocatePolicy, ElasticPolicy, Policy, Roomy
from gyre.simulation import Scenario, simulate

CELLS, SLOTS, GROUP_SIZE = 8, 3, 8
WINDOW = round(ROLLOUTS_PER_SLOT * CELLS * SLOTS)
BASELINES = ("colocate, staleness 0", "colocate, staleness 1", "async, even split", "async, best split")


def ratios(preset: str, steps: int, seed: int, compression: float) -> list[float]:
    """Seconds of each of BASELINES by elastic's, on one seed's work."""
    work = make_work(
        preset, cells=CELLS, slots=SLOTS, groups=scaled_groups(preset, SLOTS, GROUP_SIZE), group_size=GROUP_SIZE,
        steps=steps, compression=compression, per_token=50.0, longest=CONTEXT - SLACK, seed=seed,
    )  # fmt: skip
    scenario = replace(scenario_of(work), window=WINDOW)
    ours = _seconds(scenario, Roomy(ElasticPolicy(), ROLLOUTS_PER_SLOT, WINDOW), 1)
    splits = [_seconds(scenario, AsyncPolicy(tuple(f"c{i}" for i in range(k))), 1) for k in range(1, CELLS)]
    colocate = [_seconds(scenario, ColocatePolicy(), staleness) for staleness in (0, 1)]
    return [theirs / ours for theirs in (*colocate, splits[CELLS // 2 - 1], min(splits))]


def _seconds(scenario: Scenario, policy: Policy, staleness: int) -> float:
    return simulate(scenario, policy, staleness=staleness, decide_s=DECIDE_S).seconds


def main() -> None:
    """Parse, simulate, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic.expected", description=__doc__)
    parser.add_argument("--preset", default="terminal-tail")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--compression", type=float, default=150.0)
    x = parser.parse_args()
    rows = [ratios(x.preset, x.steps, seed, x.compression) for seed in range(x.seeds)]
    for name, column in zip(BASELINES, zip(*rows, strict=True), strict=True):
        print(f"{name:22} {statistics.median(column):.2f}x ({min(column):.2f}-{max(column):.2f})")


if __name__ == "__main__":
    main()
