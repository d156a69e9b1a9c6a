"""A harness that only the run file knows: its command, a settings file, and how its calls speak."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.gateway.harness_runs import seen_openai  # noqa: F401 - adds its readers
from tests.gateway.harness_runs.invariants import check
from tests.gateway.harness_runs.run_harness import run_harness
from tests.gateway.harness_runs.seen import READERS, Item, Seen
from tests.gateway.harness_runs.shape import record
from tests.gateway.harness_runs.table import table
from tests.scripted.engine import ScriptedEngine
from tests.scripted.fixtures import MakeWorld

HARNESS = {
    "name": "command",
    "command": [sys.executable, str(Path(__file__).with_name("own_agent.py")), "{instruction}"],
    "files": {
        ".config/own-agent.json": '{"url": "{base_url}/v1", "key": "{api_key}", "model": "{model}", "most": 50}',
    },
    "dialect": {
        "agent_header": "X-Own-Agent",
        "strip_system": [r" It is [0-9T:.-]+\."],
        "kinds": [
            {"kind": "auxiliary", "last": "^Give a title to"},
            {"kind": "main-summary", "last": "^CONTEXT CHECKPOINT COMPACTION"},
            {"kind": "sub-agent", "header": "x-own-agent", "matches": "^sub-"},
        ],
    },
}


async def test_thirty_turns(
    scripted_world: MakeWorld, scripted_engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, read_answer = READERS["/v1/chat/completions"]
    monkeypatch.setitem(READERS, "/v1/chat/completions", (lambda body: _without_the_time(read(body)), read_answer))
    world = await scripted_world(harness=HARNESS, context=65_536)
    script = scripted_engine.script
    parts = [script([{"think": n, "tools": [bash(f"echo {i} >> {n}.txt")]} for i in range(3)]) for n in "ab"]
    marker = script(
        [
            {"think": "t0", "text": "Look.", "tools": [bash("ls"), bash("cat README.md")]},
            {"think": "agents", "tools": [{"name": "delegate", "input": {"command": f"{m} Write."}} for m in parts]},
            *({"think": f"t{i}", "tools": [bash(f"echo {i} >> c.txt")]} for i in range(30)),
        ]
    )
    ran = await run_harness(world, [scripted_engine], f"{marker} Do it.", tmp_path / "r")
    assert ran.code == 0, ran.log[-2000:]
    facts = check(ran)
    print(f"\n{table([('a command', facts)])}")
    record(ran, "command")
    for name, lines in (("a", 3), ("b", 3), ("c", 30)):
        assert (ran.workspace / f"{name}.txt").read_text().split() == [str(i) for i in range(lines)]
    kinds = [c.kind for c in world.calls()]
    assert facts.turns >= 30 and facts.other == {}
    assert {k: kinds.count(k) for k in set(kinds) - {"main"}} == {"auxiliary": 1, "main-summary": 1, "sub-agent": 8}
    # The title, then main, two sub-agents, and what follows the summary. The wish for it is a user message, before
    # which the template drops thinking.
    assert facts.forks == {"root": 1, "new_root": 4, "thinking_dropped": 1}


def bash(command: str) -> dict[str, object]:
    return {"name": "bash", "input": {"command": command}}


def _without_the_time(seen: Seen) -> Seen:
    first = seen.items[0]
    text = re.sub(" It is [^ ]+", "", first.text)
    assert text != first.text
    return Seen([Item(first.role, text), *seen.items[1:]], seen.tools)
