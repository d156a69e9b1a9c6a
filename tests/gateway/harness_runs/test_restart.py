"""Codex and Qwen Code while the gateway is restarted, then killed, in the middle of calls: they wait and go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gyre.harness import codex, npm, qwen_code
from gyre.harness.base import HarnessError
from tests.gateway.harness_runs.invariants import check
from tests.gateway.harness_runs.run_harness import run_harness
from tests.scripted.engine import ScriptedEngine
from tests.scripted.fixtures import MakeWorld
from tests.scripted.gateway import GatewayProcess

STEPS = 8
TOOLS: dict[str, Any] = {
    codex.Codex.name: lambda c: {"name": "exec_command", "input": {"cmd": c}},
    qwen_code.QwenCode.name: lambda c: {
        "name": "run_shell_command",
        "input": {"command": c, "is_background": False, "description": "a step"},
    },
}


def _missing() -> str | None:
    try:
        for module in (codex, qwen_code):
            npm.package(module.PACKAGE, module.VERSION)
        npm.node()
    except HarnessError as error:
        return str(error)
    return None


@pytest.mark.skipif(_missing() is not None, reason=str(_missing()))
@pytest.mark.parametrize("name", list(TOOLS))
async def test_the_gateway_is_restarted_and_killed_in_mid_call(
    scripted_world: MakeWorld, scripted_engine: ScriptedEngine, tmp_path: Path, name: str
) -> None:
    world = await scripted_world(harness={"name": name})
    await world.served.stop()
    gateway = GatewayProcess(world, tmp_path / "gateway")
    world.served = gateway  # type: ignore[assignment]
    await gateway.start()
    # Calls 2, 5 and 8, which are of the steps 2, 4 and 6, are slow: what happens finds them in the middle.
    slow, tool = (2, 4, 6), TOOLS[name]
    marker = scripted_engine.script(
        [
            {"think": f"t{i}", "token_s": 0.04 if i in slow else 0.0, "tools": [tool(f"echo {i} >> log.txt")]}
            for i in range(STEPS)
        ]
    )

    async def interrupt(*_: object) -> None:
        # A gateway that ends answers first, with a 503; one that is killed does not.
        for calls, end in ((2, gateway.end), (5, gateway.stop), (8, gateway.stop)):
            await world.until(
                lambda calls=calls: len(world.calls()) > calls and world.calls()[-1].status == "running", 120.0
            )
            await end()
            await gateway.start()

    try:
        ran = await run_harness(world, [scripted_engine], f"{marker} Do it.", tmp_path / "r", meanwhile=interrupt)
    finally:
        await gateway.stop()
    assert ran.code == 0, ran.log[-2000:]
    assert (ran.workspace / "log.txt").read_text().split() == [str(i) for i in range(STEPS)]
    facts = check(ran)
    assert facts.calls == STEPS + 1 and facts.forks == {"root": 1}
    assert facts.other == {"incomplete": 3}, "not each came in the middle of a call"
