"""The agent of a paced cell: Gyre's own, over a paced engine and a paced trainer.

python -m benchmarks.elastic.agent --cell NAME      (as workers.cell_agent)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from activities.cell_site import Programs
from gyre.serving.launch import EngineProcess
from workers import cell_agent


class PacedProcess(EngineProcess):
    """Runs `benchmarks.elastic.engine` where SGLang would be."""

    def command(self, policy_path: Path, port: int, version: int) -> tuple[list[str], dict[str, str]]:
        argv = [sys.executable, "-m", "benchmarks.elastic.engine", "--port", str(port), "--policy", str(policy_path)]
        argv += ["--version", str(version), "--data", os.environ["GYRE_DATA"]]
        argv += ["--kv-tokens", str(self._serving.kv_tokens)]
        return argv, {}


if __name__ == "__main__":
    cell_agent.main(Programs(PacedProcess, "benchmarks.elastic.trainer"))
