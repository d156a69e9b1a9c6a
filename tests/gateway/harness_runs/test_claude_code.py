"""The real Claude Code over the gateway and the scripted engine (`make harnesses` installs it)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gyre.harness import claude_code, npm
from gyre.harness.base import HarnessError
from tests.gateway.harness_runs.invariants import Facts, check
from tests.gateway.harness_runs.run_harness import run_harness
from tests.gateway.harness_runs.table import table
from tests.scripted.engine import ScriptedEngine
from tests.scripted.fixtures import MakeWorld

NEWEST = "2.1.332"


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


@pytest.fixture(scope="module")
def figures() -> Iterator[Callable[[str, Facts], None]]:
    """Collects the lines of the table that `pytest -s` prints."""
    rows: list[tuple[str, Facts]] = []
    yield lambda name, facts: rows.append((name, facts))
    print(f"\n{table(rows)}")


LONG = [
    {
        "think": "t0",
        "text": "Write.",
        "tools": [{"name": "Write", "input": {"file_path": "{ws}/big.txt", "content": "a line  \n" * 40}}],
    },
    {"think": "t1", "tools": [bash("seq 1 3000 > numbers.txt; echo ok")]},
    {"think": "t2", "tools": [{"name": "Read", "input": {"file_path": "{ws}/numbers.txt"}}]},
    {"text": "Two at once.", "tools": [bash("seq 1 300"), {"name": "Read", "input": {"file_path": "{ws}/README.md"}}]},
    {
        "think": "t4",
        "tools": [
            {"name": "Edit", "input": {"file_path": "{ws}/README.md", "new_string": "bye", "old_string": "hello"}}
        ],
    },
    {"tools": [bash("false")]},
    {"tools": [{"name": "Nope", "input": {"x": 1}}]},
    {"tools": [{"name": "Bash", "input": {"command": 5}}]},
    {"tools": [{"name": "Read", "input": {"offset": "1", "file_path": "{ws}/missing.txt"}}]},
    {"tools": [bash("echo ü ✓", timeout="2000", unknown_key=1)]},
    *({"think": f"t{i}", "tools": [bash(f"seq 1 {50 + i}")]} for i in range(22)),
]


async def test_thirty_turns(
    scripted_world: MakeWorld, scripted_engine: ScriptedEngine, tmp_path: Path, figures: Any
) -> None:
    world = await scripted_world(harness={"name": "claude-code"}, context=131_072)
    marker = scripted_engine.script(_in(LONG, tmp_path))
    run = await run_harness(world, [scripted_engine], f"{marker} Do it.", tmp_path / "r")
    assert run.code == 0, run.log[-2000:]
    facts = check(run)
    figures("30 turns with tools", facts)
    assert facts.turns >= 30
    assert facts.unexpected == set()


def _in(value: Any, tmp_path: Path) -> Any:
    """A script whose `{ws}` is the workspace."""
    workspace = str(tmp_path / "r" / "box" / "workspace")
    if isinstance(value, str):
        return value.replace("{ws}", workspace)
    if isinstance(value, list):
        return [_in(v, tmp_path) for v in value]
    return {k: _in(v, tmp_path) for k, v in value.items()} if isinstance(value, dict) else value
