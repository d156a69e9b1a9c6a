"""The real Codex over the gateway and the scripted engine (`make harnesses` installs it)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gyre.harness import codex, npm
from gyre.harness.base import HarnessError
from gyre.harness.codex import compaction
from tests.gateway.harness_runs import seen_openai  # noqa: F401 - adds its readers
from tests.gateway.harness_runs.invariants import check
from tests.gateway.harness_runs.run_harness import run_harness
from tests.gateway.harness_runs.shape import record
from tests.gateway.harness_runs.table import table
from tests.scripted.engine import ScriptedEngine
from tests.scripted.fixtures import MakeWorld

# Its opening is 12,000 tokens here, a sub-agent's 8,000; it compacts above context - max_tokens - 12,000.
CONTEXT = 49_152


def _missing() -> str | None:
    try:
        npm.package(codex.PACKAGE, codex.VERSION)
    except HarnessError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif(_missing() is not None, reason=str(_missing()))


def run(command: str) -> dict[str, Any]:
    return {"name": "exec_command", "input": {"cmd": command}}


def spawn(message: str) -> dict[str, Any]:
    return {"name": "multi_agent_v1.spawn_agent", "input": {"message": message}}


WAIT = {
    "name": "multi_agent_v1.wait_agent",
    "input": {"targets": {"$findall": r'"agent_id":"([0-9a-f-]+)"'}, "timeout_ms": 3_000_000},
}


async def test_thirty_turns_two_sub_agents_and_compactions(
    scripted_world: MakeWorld, scripted_engine: ScriptedEngine, tmp_path: Path
) -> None:
    world = await scripted_world(harness={"name": "codex"}, context=CONTEXT, max_tokens=2048)
    script = scripted_engine.script
    short = script([{"think": "a", "tools": [run(f"echo {i} >> a.txt; sleep 0.2")]} for i in range(3)])
    # Each of these outputs is 10,000 tokens.
    long = script([{"think": "b", "tools": [run(f"echo {i} >> b.txt; seq 1 2400")]} for i in range(4)])
    marker = script(
        [
            {"think": "t0", "text": "Write.", "tools": [run("seq 1 1000 > numbers.txt; echo ok")]},
            {"think": "t1", "text": "\n\nTwo at once.  \n", "tools": [run("cat numbers.txt"), run("cat README.md")]},
            {"tools": [{"name": "nope", "input": {"x": 1}}]},
            {"tools": [{"name": "exec_command", "input": {"command": 5}}]},
            {"tools": [run("false")]},
            {"think": "agents", "tools": [spawn(f"{short} Write a.txt."), spawn(f"{long} Write b.txt.")]},
            {"tools": [WAIT]},
            {"think": "again", "tools": [WAIT]},
            *({"think": f"t{i}", "tools": [run(f"echo {i} >> c.txt; seq 1 1000")]} for i in range(24)),
        ]
    )
    ran = await run_harness(world, [scripted_engine], f"{marker} Do it.", tmp_path / "r")
    assert ran.code == 0, ran.log[-2000:]
    facts = check(ran)
    print(f"\n{table([('codex', facts)])}")
    record(ran, "codex")
    for name, lines in (("a", 3), ("b", 4), ("c", 24)):
        assert (ran.workspace / f"{name}.txt").read_text().split() == [str(i) for i in range(lines)]
    calls = world.calls()
    kinds = [c.kind for c in calls]
    assert facts.turns >= 30 and facts.other == {}
    assert kinds.count("main-summary") >= 2 and kinds.count("sub-agent-summary") >= 1
    assert set(kinds) == {"main", "main-summary", "sub-agent", "sub-agent-summary"}
    # A compaction offers no tools: it begins a conversation, as what follows it does, and a sub-agent's first call.
    summaries = kinds.count("main-summary") + kinds.count("sub-agent-summary")
    beginnings = ("root", "new_root", "tools_changed", "turn_dropped")
    assert sum(facts.forks.get(reason, 0) for reason in beginnings) == 1 + 2 + 2 * summaries
    # Word of a sub-agent's end is a user message: the template drops the thinking before it.
    assert set(facts.forks) <= {*beginnings, "thinking_dropped"} and facts.forks["thinking_dropped"] <= 2
    agents = {c.agent for c in calls}
    assert len(agents) == 3 and {c.agent for c in calls if c.kind.startswith("main")} == {""}


def test_a_context_leaves_room_for_an_answer_and_its_results() -> None:
    assert compaction(0, 4096) == {}
    for context in (4096, 32_768, 1_000_000):
        said = compaction(context, min(4096, context // 4))
        threshold = said["model_auto_compact_token_limit"]
        assert isinstance(threshold, int) and context // 2 <= threshold < context
