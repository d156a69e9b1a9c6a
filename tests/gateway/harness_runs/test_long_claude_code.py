"""A rollout of Claude Code as long as an afternoon's work, whose tree `benchmarks/trees` trains.

It takes minutes and proves nothing that shorter runs do not, so it runs only where trees are recorded:

    GYRE_RECORD_TREES=benchmarks/trees/recorded python -m pytest tests/gateway/harness_runs/test_long_claude_code.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.harness import claude_code
from tests.gateway.harness_runs.run_harness import run_harness
from tests.gateway.harness_runs.shape import FOLDER, record
from tests.gateway.harness_runs.test_claude_code import agent, bash
from tests.scripted.engine import ScriptedEngine
from tests.scripted.fixtures import MakeWorld

pytestmark = pytest.mark.skipif(FOLDER not in os.environ, reason=f"records a tree: where, says {FOLDER}")

LONG = {"long": (200, {12: 2, 60: 1, 75: 2, 130: 1})}
"""By name: turns of the main agent, and after how many of them sub-agents begin, and how many at once. Sub-agents take
6 to 16 turns each."""


def turn(rng: np.random.Generator) -> dict[str, Any]:
    """A tool call: some 80 tokens said and 1,200 read, both with a long tail (log-normal; seq prints 4 tokens a
    line)."""
    said = min(int(rng.lognormal(np.log(50), 0.8)), 600)
    lines = min(int(rng.lognormal(np.log(300), 1.0)), 4000)
    return {"think": "So: " + "it follows " * (said // 2), "tools": [bash(f"seq 1 {lines}")]}


def work(engine: ScriptedEngine, rng: np.random.Generator, turns: int, agents: dict[int, int]) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    for at in range(turns):
        if at in agents:
            parts = [engine.script([turn(rng) for _ in range(rng.integers(6, 17))]) for _ in range(agents[at])]
            steps.append({"text": "Parts of it, apart.", "tools": [agent(part) for part in parts]})
        steps.append(turn(rng))
    return steps


@pytest.mark.parametrize("name", LONG)
async def test_a_long_rollout(
    name: str, scripted_world: MakeWorld, scripted_engine: ScriptedEngine, tmp_path: Path
) -> None:
    """Its context of 131,072 tokens is compacted several times, and sub-agents work for it."""
    turns, agents = LONG[name]
    world = await scripted_world(harness={"name": "claude-code"}, context=131_072, max_tokens=8192)
    steps = work(scripted_engine, np.random.default_rng(0), turns, agents)
    marker = scripted_engine.script(steps, summary=" Found so far:" + " this and that," * 400)
    run = await run_harness(world, [scripted_engine], f"{marker} Do it.", tmp_path / "r", limit_s=3000.0)
    assert run.code == 0, run.log[-2000:]
    record(run, f"claude-code-{claude_code.VERSION}-{name}")
    calls = world.calls(run.member)
    assert sum(c.kind == "main-summary" for c in calls) >= turns // 60
    assert len({c.agent for c in calls if c.kind == "sub-agent"}) == sum(agents.values())
