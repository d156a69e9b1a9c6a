"""Run a real harness once, as gyre.harness says, against a world's gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre.harness import process, shepherd
from gyre.harness.base import BOX, LaunchContext
from gyre.harness.registry import make_harness
from tests.gateway.conftest import World
from tests.gateway.harness_runs.recorder import Exchange, Recorder
from tests.scripted.engine import ScriptedEngine

LIMIT_S = 600.0


@dataclass
class HarnessRun:
    """A harness that has ended, and all that was said."""

    world: World
    engines: Sequence[ScriptedEngine]
    member: int
    folder: Path
    end: process.Status
    exchanges: list[Exchange]

    @property
    def workspace(self) -> Path:
        return self.folder / BOX / "workspace"

    @property
    def code(self) -> int | None:
        """The exit code."""
        return self.end.code if isinstance(self.end, process.Exited) else None

    @property
    def log(self) -> str:
        """What the harness printed."""
        return (self.folder / shepherd.LOG_FILE).read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """The JSON objects among the lines that the harness printed."""
        lines = (line for line in self.log.splitlines() if line.startswith("{"))
        return [json.loads(line) for line in lines]


def prepare(folder: Path, files: dict[str, str] | None = None) -> Path:
    """A rollout's folder with a small workspace; the workspace."""
    for name in ("workspace", "home", "tmp"):
        (folder / BOX / name).mkdir(parents=True)
    workspace = folder / BOX / "workspace"
    for name, text in {"README.md": "hello\n", **(files or {})}.items():
        (workspace / name).write_text(text)
    return workspace


async def run_harness(
    world: World,
    engines: Sequence[ScriptedEngine],
    instruction: str,
    folder: Path,
    *,
    member: int = 0,
    files: dict[str, str] | None = None,
    meanwhile: Callable[[Recorder, Path], Awaitable[None]] | None = None,
    limit_s: float = LIMIT_S,
) -> HarnessRun:
    """Run `world.run.harness` on `instruction` as the rollout of `member`, to its end or `limit_s`.

    `meanwhile` runs beside it, with the proxy and the rollout's folder, and must end before the harness's limit.
    `{workspace}` in the instruction is not filled in: scripts name relative paths, or use `prepare` first.
    """
    workspace = folder / BOX / "workspace"
    if not workspace.exists():
        prepare(folder, files)
    run = world.run
    async with Recorder(world.served.url) as recorder:
        token = world.tokens[member]
        launch = make_harness(run.harness).command(
            LaunchContext(
                base_url=f"{recorder.url}/r/{token}",
                api_key=token,
                model=run.policy.name,
                instruction=instruction,
                workspace=workspace,
                rollout_dir=folder,
                context=run.policy.context,
                max_tokens=run.sampling.max_tokens,
            )
        )
        await asyncio.to_thread(process.start, launch, folder)
        beside = asyncio.create_task(meanwhile(recorder, folder)) if meanwhile is not None else None
        try:
            async with asyncio.timeout(limit_s):
                if beside is not None:
                    await beside
                end: process.Status = await process.wait(folder)
        except TimeoutError:
            end = await asyncio.to_thread(process.kill_tree, folder)
        finally:
            if beside is not None:
                beside.cancel()
            await asyncio.to_thread(process.kill_tree, folder)
    # Calls of a harness that was ended are recorded when the gateway has noticed.
    await world.until(lambda: all(c.status != "running" for c in world.calls(member)), 60.0)
    return HarnessRun(world, engines, member, folder, end, recorder.exchanges)
