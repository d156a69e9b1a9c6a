"""Form (b): the whole control plane, eight cells that keep a cost model's time."""

from __future__ import annotations

from pathlib import Path

from benchmarks.elastic.costs import write_costs
from benchmarks.elastic.runs import Way
from benchmarks.elastic.workload import CONFIG, FIRST, PacedWork, write_tasks
from gyre.config import RunConfig
from workers.stack.services import make_folders

AGENT = "benchmarks.elastic.agent"
POLICY = Path(__file__).parents[2] / "examples" / "quickstart" / "policy"
"""Only its tokenizer is used."""
CONTEXT = 8192
LIGHT = {
    "name": "command",
    "command": [
        "python3", "-I", "-S", str(Path(__file__).with_name("light.py")), "{base_url}", "{model}",
        "{instruction} next " + str(FIRST),
    ],
}  # fmt: skip
SLACK = 600
"""Tokens of the context that no rollout uses: the harness's own texts, and the longest answer."""


def paced_run(work: PacedWork, way: Way, data: Path, window: int, seed: int = 0, *, light: bool = False) -> RunConfig:
    """The run of `work` under `way`, with its tasks, settings and costs written below `data`; at most `window`
    rollouts are under way at once. `light`: under benchmarks/elastic/light.py instead of mini-swe-agent."""
    make_folders(data)
    write_costs(data, work.cost)
    write_tasks(work, data / "tasks", seed)
    (data / "mini.yaml").write_text(CONFIG)
    slots = work.cost.slots
    run = RunConfig.model_validate(
        {
            "name": "paced", "seed": seed, "steps": len(work.steps),
            "policy": {"path": str(POLICY), "context": CONTEXT},
            "tasks": {"train": str(data / "tasks")},
            "harness": LIGHT if light else {"name": "mini-swe-agent", "config": str(data / "mini.yaml")},
            "rollouts": {
                "groups_per_step": work.groups, "group_size": work.group_size,
                "max_concurrent": window,
                "time_limit_s": work.time_limit_s, "score_time_limit_s": 60.0,
            },
            "sampling": {"max_tokens": SLACK - 100},
            "trainer": {"micro_batch_tokens": max(64, round(work.cost.micro_batch_tokens))},
            "serving": {"max_running": slots, "kv_tokens": CONTEXT * slots, "kv_migration": "off"},
            "cells": [{"name": f"c{i}", "central": i == 0} for i in range(work.cells)],
            "stack": {"transfer": "socket"},
        }
    )  # fmt: skip
    return way.of(run)
