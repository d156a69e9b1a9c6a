"""The real mini-swe-agent over the gateway and the scripted engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.gateway.harness_runs import seen_openai  # noqa: F401 - adds its readers
from tests.gateway.harness_runs.invariants import check
from tests.gateway.harness_runs.run_harness import run_harness
from tests.gateway.harness_runs.table import table
from tests.scripted.engine import ScriptedEngine
from tests.scripted.fixtures import MakeWorld


def run(command: str, **more: Any) -> dict[str, Any]:
    return {"name": "bash", "input": {"command": command, **more}}


async def test_thirty_turns(scripted_world: MakeWorld, scripted_engine: ScriptedEngine, tmp_path: Path) -> None:
    world = await scripted_world(harness={"name": "mini-swe-agent"}, context=65_536)
    marker = scripted_engine.script(
        [
            {"think": "  t0\n", "text": "\n\nLook. \n", "tools": [run("ls  \n")]},
            {"tries": [{"text": "No call.", "mark": False}, {"text": "Now a call.", "tools": [run("pwd")]}]},
            {"tries": [{"think": "Only thought.", "mark": False}, {"tools": [run("false")]}]},
            {"tries": [{"tools": [{"name": "nope", "input": {"x": 1}}], "mark": False}, {"tools": [run("cat none")]}]},
            {"text": "Two.", "tools": [run("echo 1"), run("echo 2")]},
            {"text": "Long.", "tools": [run("seq 1 3000", extra=1.0)]},
            *({"think": f"t{i}", "tools": [run(f"echo {i} >> c.txt")]} for i in range(24)),
            {"text": "Done.", "tools": [run("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]},
        ]
    )
    ran = await run_harness(world, [scripted_engine], f"{marker} Do it.", tmp_path / "r")
    assert ran.code == 0, ran.log[-2000:]
    facts = check(ran)
    print(f"\n{table([('mini-swe-agent', facts)])}")
    assert (ran.workspace / "c.txt").read_text().split() == [str(i) for i in range(24)]
    assert facts.turns >= 30 and facts.branches["main"] >= 1
    # A turn that it cannot use is left out of what it sends next; its complaint about it stays.
    assert facts.forks == {"root": 1, "turn_dropped": 3}
