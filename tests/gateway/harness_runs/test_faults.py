"""Claude Code through 100 calls while everything happens to cells and gateway: it ends as if nothing had."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gyre.config import ServingConfig
from gyre.harness import claude_code, npm
from gyre.harness.base import HarnessError
from tests.gateway.harness_runs.invariants import check
from tests.gateway.harness_runs.run_harness import HarnessRun, prepare, run_harness
from tests.scripted.engine import ScriptedEngine
from tests.scripted.faults import Faults
from tests.scripted.fixtures import MakeWorld
from tests.scripted.gateway import GatewayProcess
from tests.scripted.proof import prove

CALLS = 100
SEED = int(os.environ.get("GYRE_FAULT_SEED", "20"))
KINDS = ["switch"] * 3 + ["update"] * 3 + ["hang"] * 2 + ["kill engine", "kill gateway"]
# A silent engine is given up after so many seconds.
PATIENT = ServingConfig(max_running=16, kv_tokens=400_000, request_timeout_s=1.5)


def _missing() -> str | None:
    try:
        npm.package(claude_code.PACKAGE, claude_code.VERSION)
    except HarnessError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif(_missing() is not None, reason=str(_missing()))


@pytest.fixture(scope="module")
def cells(
    scripted_policy: Path, scripted_engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ScriptedEngine]]:
    """Two engines of our own, to be killed."""
    folder = tmp_path_factory.mktemp("faults")
    engines = {n: ScriptedEngine(folder, scripted_policy, scripted_engine.scripts, n) for n in ("c0", "c1")}
    try:
        for engine in engines.values():
            engine.start(version=3)
        for engine in engines.values():
            asyncio.run(engine.wait_ready())
        yield engines
    finally:
        for engine in engines.values():
            engine.stop()


def step(i: int, workspace: Path, slow: bool) -> dict[str, Any]:
    """What is done once too often, or not at all, shows in the workspace."""
    file = str(workspace / f"f{i // 4}.txt")
    calls = [
        {"name": "Write", "input": {"file_path": file, "content": f"first {i}\n"}},
        {"name": "Bash", "input": {"command": f"echo {i} >> log.txt; echo second >> f{i // 4}.txt"}},
        {"name": "Read", "input": {"file_path": file}},
        {"name": "Edit", "input": {"file_path": file, "old_string": "second", "new_string": f"third {i}"}},
    ]
    # Slow: so that a fault finds a call in the middle.
    said = {"think": "On.", "canonical": True, "token_s": 0.02 if slow else 0.0}
    return {**said, "tools": [calls[i % 4]]}


def files(run: HarnessRun) -> dict[str, str]:
    return {str(p.relative_to(run.workspace)): p.read_text() for p in run.workspace.rglob("*") if p.is_file()}


async def test_nothing_that_happens_is_seen(
    scripted_world: MakeWorld,
    scripted_engine: ScriptedEngine,
    cells: dict[str, ScriptedEngine],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A run with its cells and gateway disturbed, beside one that is left alone: same exit code, same workspace, and
    every stored id is one that an engine got or gave."""
    tmp_path = tmp_path_factory.mktemp("f")  # a short name: the policy spells it out in every call
    harness = {"name": "claude-code"}
    calm = await scripted_world(harness, context=131_072, name="calm")
    hit = await scripted_world(harness, context=131_072, name="hit", serving=PATIENT)
    await hit.served.stop()
    gateway = GatewayProcess(hit, tmp_path / "gateway")
    hit.served = gateway  # type: ignore[assignment]
    faults = Faults(hit, cells, gateway, SEED)
    for name in cells:
        faults.register(name)
    await gateway.start()
    plan = faults.plan(KINDS, CALLS)
    slow = {place for place, _ in plan}

    def task(folder: Path, slow: set[int]) -> str:
        workspace = prepare(folder)
        return scripted_engine.script([step(i, workspace, i in slow) for i in range(CALLS - 1)]) + " Do it."

    undisturbed, run = await asyncio.gather(
        run_harness(calm, [scripted_engine], task(tmp_path / "calm", set()), tmp_path / "calm"),
        run_harness(
            hit, list(cells.values()), task(tmp_path / "hit", slow), tmp_path / "hit",
            meanwhile=lambda *_: faults.inject(plan), limit_s=600.0,
        ),
    )  # fmt: skip
    assert sum(faults.done.values()) == len(KINDS)
    assert (run.code, undisturbed.code) == (0, 0), run.log[-2000:]
    assert files(run) == files(undisturbed)
    facts = check(run)
    assert facts.calls == CALLS
    assert facts.forks == {"root": 1} and facts.branches == {"main": 1}
    assert prove(calm, [scripted_engine]) == CALLS
    calls = [c for c in hit.calls() if c.leaf_id is not None]
    assert any(len(c.cells) > 1 for c in calls), "no fault met a call"
    spans = [s for c in calls for s in hit.node(c.leaf_id).version_spans or []]
    assert len({version for version, _, _ in spans}) > 1, "no call was sampled after an update"
