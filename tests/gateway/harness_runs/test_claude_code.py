"""The real Claude Code over the gateway and the scripted engine (`make harnesses` installs it)."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gyre.gateway import anthropic_messages
from gyre.harness import claude_code, npm, process
from gyre.harness.base import HarnessError
from tests.gateway.conftest import World
from tests.gateway.harness_runs.invariants import Facts, check
from tests.gateway.harness_runs.recorder import Recorder
from tests.gateway.harness_runs.run_harness import run_harness
from tests.gateway.harness_runs.shape import record
from tests.gateway.harness_runs.table import table
from tests.scripted.engine import ScriptedEngine
from tests.scripted.fixtures import MakeWorld

NEWEST = "2.1.332"
EXAMPLE = Path(__file__).parents[3] / "examples" / "claude_code"


def _missing() -> str | None:
    try:
        for version in (claude_code.VERSION, NEWEST):
            npm.package(claude_code.PACKAGE, version)
    except HarnessError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif(_missing() is not None, reason=str(_missing()))


def bash(command: str, **more: Any) -> dict[str, Any]:
    return {"name": "Bash", "input": {"command": command, "description": "a step", **more}}


def write(name: str, content: str) -> dict[str, Any]:
    return {"name": "Write", "input": {"file_path": f"{{ws}}/{name}", "content": content}}


def read(name: str, **more: Any) -> dict[str, Any]:
    return {"name": "Read", "input": {**more, "file_path": f"{{ws}}/{name}"}}


def edit(name: str, **more: Any) -> dict[str, Any]:
    return {"name": "Edit", "input": {"file_path": f"{{ws}}/{name}", **more}}


def agent(marker: str, **more: Any) -> dict[str, Any]:
    settings = {"subagent_type": "general-purpose", "run_in_background": False, **more}
    return {"name": "Agent", "input": {"description": "a part", "prompt": f"{marker} Do your part.", **settings}}


@pytest.fixture(scope="module")
def figures() -> Iterator[Callable[[str, Facts], None]]:
    """Collects the lines of the table that `pytest -s` prints."""
    rows: list[tuple[str, Facts]] = []
    yield lambda name, facts: rows.append((name, facts))
    print(f"\n{table(rows)}")


LONG = [
    {"think": "t0", "text": "Write.", "tools": [write("big.txt", "a line  \n" * 40)]},
    {"think": "t1", "tools": [bash("seq 1 3000 > numbers.txt; echo ok")]},
    {"think": "t2", "tools": [read("numbers.txt")]},
    {"text": "Two at once.", "tools": [bash("seq 1 300"), read("README.md")]},
    {"think": "t4", "tools": [edit("README.md", new_string="bye", old_string="hello")]},
    {"tools": [bash("false")]},
    {"tools": [{"name": "Nope", "input": {"x": 1}}]},
    {"tools": [{"name": "Bash", "input": {"command": 5}}]},
    {"tools": [read("missing.txt", offset="1")]},
    {"tools": [bash("echo ü ✓", timeout="2000", unknown_key=1)]},
    # CASES 3: a call that is cut short, arguments that are no object, an empty answer.
    {
        "text": "No object.",
        "raw": '(step 10) No object.\n<tool_call>\n{"name": "Bash", "arguments": "ls"}\n</tool_call>',
    },
    {"tools": [bash("sleep 60; echo late > late.txt", timeout=1500)]},
    {"tools": [bash("echo start; kill -9 $$")]},
    *({"think": f"t{i}", "tools": [bash(f"seq 1 {50 + i}")]} for i in range(20)),
    {"raw": '(step 33) Cut short.\n<tool_call>\n{"name": "Bash", "arguments": {"comm'},
]


async def test_thirty_turns(
    scripted_world: MakeWorld, scripted_engine: ScriptedEngine, tmp_path: Path, figures: Any
) -> None:
    """Tools of all kinds, known and unknown, edited echoes, a tool that is aborted at its time limit, and thinking."""
    world = await scripted_world(harness={"name": "claude-code"}, context=131_072)
    marker = scripted_engine.script(_in(LONG, tmp_path))
    run = await run_harness(world, [scripted_engine], f"{marker} Do it.", tmp_path / "r")
    assert run.code == 0, run.log[-2000:]
    facts = check(run)
    figures("2.1.220: 30 turns with tools, an aborted one", facts)
    assert facts.turns >= 30
    assert facts.unexpected == set()
    assert facts.branches == {"main": 1}
    assert not (run.workspace / "late.txt").exists()


def until(file: str) -> str:
    """A shell's wait for a file of the workspace."""
    return f"for i in $(seq 900); do [ -e {file} ] && break; sleep 0.1; done"


def parts(engine: ScriptedEngine) -> list[str]:
    """Markers of three sub-agents' scripts: a few steps each, a file at the end, and a result. Neither of the first
    two makes its third call before the other has made its first."""

    def part(name: str) -> str:
        other = {"a": "b", "b": "a", "c": "c"}[name]
        commands = [
            f"seq 0 40; touch {name}.begun",
            f"{until(f'{other}.begun')}; seq 1 40",
            f"seq 2 40; touch {name}.done",
        ]
        steps = [{"think": f"s{i}", "text": f"Part {i}.", "tools": [bash(c)]} for i, c in enumerate(commands)]
        return engine.script(steps, final={"text": f"Result {name}."})

    return [part(name) for name in "abc"]


def work(subs: list[str], turns: int) -> list[dict[str, Any]]:
    """Two sub-agents at once, one in the background, then turns that fill the context; one waits for the background."""
    commands = ["seq 1 900"] * turns
    commands[2] = f"{until('c.done')}; seq 1 900"
    return [
        {"think": "Spawn.", "text": "Two at once.", "tools": [agent(subs[0]), agent(subs[1])]},
        {"think": "Behind.", "tools": [agent(subs[2], run_in_background=True)]},
        *({"think": f"m{i}", "tools": [bash(c)]} for i, c in enumerate(commands)),
    ]


async def test_compaction_and_sub_agents(
    scripted_world: MakeWorld, scripted_engine: ScriptedEngine, tmp_path: Path, figures: Any
) -> None:
    """Interleaved sub-agents, a background one, and a history that is compacted before it outgrows the context."""
    world = await scripted_world(harness={"name": "claude-code"}, context=53_248, max_tokens=2048)
    marker = scripted_engine.script(work(parts(scripted_engine), 8))
    run = await run_harness(world, [scripted_engine], f"{marker} Do it.", tmp_path / "r")
    assert run.code == 0, run.log[-2000:]
    facts = check(run)
    record(run, "claude-code-2.1.220")
    figures("2.1.220: two sub-agents at once, one in the background, compaction", facts)
    compactions = [e for e in run.events() if e.get("subtype") == "compact_boundary"]
    assert len(compactions) == facts.branches["main-summary"] >= 2
    assert facts.branches["sub-agent"] == 3
    assert facts.branches["main"] == len(compactions) + 1 + facts.forks.get("thinking_dropped", 0)
    assert_interleaved(world)
    assert_expected(world)


async def test_the_newest_version(
    scripted_world: MakeWorld, scripted_engine: ScriptedEngine, tmp_path: Path, figures: Any
) -> None:
    """The same, with a context that Claude Code was not told: it compacts when the gateway says that it is too long."""
    told = {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": "200000"}
    harness = {"name": "claude-code", "version": NEWEST, "env": told}
    world = await scripted_world(harness=harness, context=32_768, max_tokens=2048)
    marker = scripted_engine.script(work(parts(scripted_engine), 8))
    run = await run_harness(world, [scripted_engine], f"{marker} Do it.", tmp_path / "r")
    assert run.code == 0, run.log[-2000:]
    facts = check(run)
    record(run, "claude-code-2.1.332")
    figures("2.1.332: the same, compaction because the gateway refused", facts)
    assert facts.other["refused"] >= 1
    assert facts.branches["main-summary"] >= 1
    assert facts.branches["sub-agent"] == 3
    assert_interleaved(world)
    assert_expected(world)


async def test_a_harness_that_is_ended_in_the_middle(
    scripted_world: MakeWorld, scripted_engine: ScriptedEngine, tmp_path: Path, figures: Any
) -> None:
    """Its time is up while the policy speaks: the engine stops, and what was sampled so far is kept and not trained."""
    world = await scripted_world(harness={"name": "claude-code"}, max_tokens=4000)
    marker = scripted_engine.script([{"tools": [bash("echo one > part.txt")]}, {"stop": False, "token_s": 0.02}])

    async def end(recorder: Recorder, folder: Path) -> None:
        await world.until(lambda: len(world.calls()) == 2, 300.0)
        await world.until(lambda: len(scripted_engine.exchanges()[-1].output) > 9, 120.0)
        await asyncio.to_thread(process.kill_tree, folder)

    run = await run_harness(world, [scripted_engine], f"{marker} Do it.", tmp_path / "r", meanwhile=end)
    facts = check(run)
    assert isinstance(run.end, process.Exited) and run.end.reason == "killed"
    assert (facts.calls, facts.other) == (1, {"incomplete": 1})
    assert (run.workspace / "part.txt").read_text() == "one\n"


async def test_the_example_run(scripted_world: MakeWorld, scripted_engine: ScriptedEngine, tmp_path: Path) -> None:
    """The example's policy learnt its first prompt from a file: it is what Claude Code sends with these arguments."""
    table = tomllib.loads((EXAMPLE / "run.toml").read_text())["harness"]
    world = await scripted_world(harness=table, context=2048, max_tokens=64)
    task = f"{scripted_engine.script([{'tools': [{'name': 'Bash', 'input': {'command': 'true'}}]}])} Do it."
    run = await run_harness(world, [scripted_engine], task, tmp_path / "r")
    assert (run.code, run.events()[-1]["result"]) == (0, "(step 1) All done.")
    check(run)
    first, second = [json.loads(e.body) for e in run.exchanges if e.method == "POST"]
    text = (EXAMPLE / "first_call.json").read_text().replace('"{instruction}"', json.dumps(task))
    [date] = re.findall(r"Today's date is (\S+)\.", json.dumps(first))
    learnt = json.loads(text.replace("{date}", date))
    asked = [anthropic_messages.parse_request(json.dumps(body).encode(), "policy") for body in (learnt, first)]
    assert asked[0].messages == asked[1].messages
    assert asked[0].tools == asked[1].tools
    assert second["messages"][-1]["content"][0]["content"] == "(Bash completed with no output)"


def assert_interleaved(world: World) -> None:
    """The calls of the first two sub-agents mix, and each keeps to its own lineage."""
    agents = [c.agent for c in world.calls() if c.kind == "sub-agent"]
    first, second = list(dict.fromkeys(agents))[:2]
    mixed = [a for a in agents if a in (first, second)]
    assert mixed != sorted(mixed, key=mixed.index)
    by_id = {c.id: c for c in world.calls()}
    for call in world.calls():
        if call.parent_call_id is not None and call.kind == "sub-agent":
            assert by_id[call.parent_call_id].agent == call.agent


def assert_expected(world: World) -> None:
    """Forks: a root for each sub-agent and after each compaction, and the summaries: a request for one leaves out the
    newest round, which is copied into the compacted history. Word of a background agent that comes after the last
    answer is a user message, before which the template drops thinking."""
    calls = [c for c in world.calls() if c.status == "complete"]
    begun: set[str] = set()
    kind = ""
    for call in calls:
        if call.kind == "main-summary":
            assert call.fork_reason in ("sibling", "turn_dropped", "new_root"), call.seq
        elif call.agent not in begun or (call.kind, kind) == ("main", "main-summary"):
            assert call.fork_reason == ("new_root" if begun else "root"), call.seq
        else:
            assert call.fork_reason is None or (call.fork_reason, call.kind) == ("thinking_dropped", "main"), call.seq
        begun.add(call.agent)
        kind = call.kind if not call.agent else kind


def _in(value: Any, tmp_path: Path) -> Any:
    """A script whose `{ws}` is the workspace."""
    workspace = str(tmp_path / "r" / "box" / "workspace")
    if isinstance(value, str):
        return value.replace("{ws}", workspace)
    if isinstance(value, list):
        return [_in(v, tmp_path) for v in value]
    return {k: _in(v, tmp_path) for k, v in value.items()} if isinstance(value, dict) else value
