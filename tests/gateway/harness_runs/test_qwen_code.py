"""The real Qwen Code over the gateway and the scripted engine (`make harnesses` installs it)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gyre.harness import npm, qwen_code
from gyre.harness.base import HarnessError
from tests.gateway.harness_runs import seen_openai  # noqa: F401 - adds its readers
from tests.gateway.harness_runs.invariants import check
from tests.gateway.harness_runs.run_harness import prepare, run_harness
from tests.gateway.harness_runs.shape import record
from tests.gateway.harness_runs.table import table
from tests.scripted.engine import ScriptedEngine
from tests.scripted.fixtures import MakeWorld

# Its opening is 21,000 tokens here; it compacts above context - 33,000.
CONTEXT = 71_680


def _missing() -> str | None:
    try:
        npm.package(qwen_code.PACKAGE, qwen_code.VERSION)
        npm.node()
    except HarnessError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif(_missing() is not None, reason=str(_missing()))


def run(command: str, **more: Any) -> dict[str, Any]:
    return {
        "name": "run_shell_command",
        "input": {"is_background": False, "command": command, "description": "a step", **more},
    }


def agent(prompt: str, **more: Any) -> dict[str, Any]:
    return {
        "name": "agent",
        "input": {"description": "a part", "prompt": prompt, "subagent_type": "general-purpose", **more},
    }


async def test_thirty_turns_two_sub_agents_and_compactions(
    scripted_world: MakeWorld, scripted_engine: ScriptedEngine, tmp_path: Path
) -> None:
    world = await scripted_world(harness={"name": "qwen-code"}, context=CONTEXT, max_tokens=2048)
    script = scripted_engine.script
    parts = [script([{"think": n, "tools": [run(f"echo {i} >> {n}.txt; sleep 0.2")]} for i in range(3)]) for n in "ab"]
    folder = tmp_path / "r"
    workspace = prepare(folder)
    marker = script(
        [
            {
                "think": "  t0\nand more \n",
                "text": "\n\nWrite.  \n",
                "tools": [{"name": "write_file", "input": {"file_path": f"{workspace}/w.txt", "content": "a \n\n"}}],
            },
            {"think": "t1", "tools": [run("seq 1 1000 > numbers.txt; echo ok", timeout=1000.0)]},
            {
                "text": "Two at once.",
                "tools": [
                    run("cat numbers.txt"),
                    {"name": "read_file", "input": {"file_path": f"{workspace}/README.md"}},
                ],
            },
            {
                "think": "t3",
                "tools": [
                    {
                        "name": "edit",
                        "input": {"old_string": "hello", "file_path": f"{workspace}/README.md", "new_string": "bye"},
                    }
                ],
            },
            {"tools": [run("false")]},
            {"tools": [{"name": "nope", "input": {"x": 1}}]},
            {"tools": [{"name": "run_shell_command", "input": {"command": 5}}]},
            {"think": "agents", "tools": [agent(f"{m} Write.", run_in_background=i > 0) for i, m in enumerate(parts)]},
            *({"think": f"t{i}", "tools": [run(f"echo {i} >> c.txt; seq 1 400")]} for i in range(24)),
        ]
    )
    ran = await run_harness(world, [scripted_engine], f"{marker} Do it.", folder)
    assert ran.code == 0, ran.log[-2000:]
    facts = check(ran)
    print(f"\n{table([('qwen-code', facts)])}")
    record(ran, "qwen")
    for name in ("a", "b"):
        assert (ran.workspace / f"{name}.txt").read_text().split() == ["0", "1", "2"]
    kinds = [c.kind for c in world.calls()]
    summaries = kinds.count("main-summary")
    # A turn that it copies behind a summary may have another text: then the script leaves out one step.
    done = (ran.workspace / "c.txt").read_text().split()
    assert 24 - summaries <= len(done) <= 24 and done == sorted(set(done), key=int)
    assert facts.turns >= 30 and facts.other == {}
    assert summaries >= 2 and set(kinds) == {"main", "main-summary", "sub-agent"}
    # Two new beginnings a compaction, of which the second has the instructions again; one for each sub-agent.
    assert facts.forks["root"] == 1 and facts.forks["new_root"] == 2 * summaries + 2
    # The wish for a summary is a user message, and so is word of an agent: the template drops the thinking before.
    assert set(facts.forks) == {"root", "new_root", "thinking_dropped"}
    assert facts.forks["thinking_dropped"] <= summaries + 1
