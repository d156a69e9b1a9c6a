"""CPU time of one mini-swe-agent run, started cold and forked from the warm server. The model is a scripted answer."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from pathlib import Path

from benchmarks.table import interleave, show
from gyre.harness import process
from gyre.harness.base import BOX
from gyre.harness.forkserver import ForkServer
from gyre.harness.mini_swe_agent import MiniSweAgent
from tests.harness.conftest import mini_launch
from tests.harness.model import ScriptedModel

ROUNDS = 3


def main() -> None:
    quickstart = Path(__file__).parents[1] / "examples" / "quickstart"
    mini = MiniSweAgent(quickstart / "mini.yaml", {})
    assert mini.preload is not None
    with tempfile.TemporaryDirectory() as folder:
        root, numbers = Path(folder), itertools.count()
        server = ForkServer(mini.preload, root / "sockets", root / "server.log")
        server.start()

        def run(fork_server: ForkServer | None) -> float:
            model = ScriptedModel(["echo hello > made.txt", "cat made.txt"])
            rollout = root / f"r{next(numbers)}"
            for name in ("workspace", "home", "tmp"):
                (rollout / BOX / name).mkdir(parents=True)
            process.start(mini_launch(mini, model, rollout), rollout, fork_server=fork_server)
            ended = asyncio.run(process.wait(rollout))
            model.close()
            if not isinstance(ended, process.Exited) or ended.cpu_s is None:
                raise RuntimeError(f"the harness did not end normally: {(rollout / 'harness.log').read_text()}")
            return ended.cpu_s

        try:
            results = interleave({"warm": lambda: run(server), "cold": lambda: run(None)}, ROUNDS)
        finally:
            server.stop()
    show("mini-swe-agent, three turns", "CPU seconds", results, "warm", more_is_better=False)
