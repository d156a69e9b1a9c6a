"""The agent of a cell that has machines and devices, all of them this machine: `python -m` as `workers.cell_agent`.

Its trainer runs under torchrun, as on several machines; its server is started as on a machine without devices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from activities.cell_site import Programs
from gyre.config import CellConfig, ServingConfig
from gyre.serving.launch import EngineProcess
from workers import cell_agent


class CpuEngine(EngineProcess):
    """The server of a CPU cell, whatever the cell has."""

    def __init__(self, serving: ServingConfig, cell: CellConfig, log_path: Path, **rest: Any) -> None:
        super().__init__(serving, cell.model_copy(update={"devices": [], "nodes": []}), log_path, **rest)


if __name__ == "__main__":
    cell_agent.main(Programs(engine=CpuEngine))
