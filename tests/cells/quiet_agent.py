"""`python -m tests.cells.quiet_agent`: as `workers.cell_agent`, with a server that starts at once and computes nothing.

For what ends with the agent where SGLang itself is not what is looked at: it takes ten seconds of two cores to start.
"""

from __future__ import annotations

import sys
from pathlib import Path

from activities.cell_site import Programs
from gyre.serving.launch import EngineProcess
from tests.cells import quiet_engine
from workers import cell_agent


class QuietProcess(EngineProcess):
    """Runs `quiet_engine` where SGLang would be."""

    def command(self, policy_path: Path, port: int, version: int) -> tuple[list[str], dict[str, str]]:
        return [sys.executable, quiet_engine.__file__, str(port)], {}


if __name__ == "__main__":
    cell_agent.main(Programs(engine=QuietProcess))
