"""Whether a cell's server shares keys and values with the other cells, and its hold on the folder where they lie."""

from __future__ import annotations

import logging
from pathlib import Path

from gyre.config import CellConfig, RunConfig
from gyre.serving.kv import KvPlan, plan_kv
from gyre.serving.kv_pages import FolderUse

log = logging.getLogger("gyre.cell")


class CellKv:
    """Decides once, at the server's first start."""

    def __init__(self, run: RunConfig, cell: CellConfig, spare: Path) -> None:
        self._run, self._cell, self._spare = run, cell, spare
        self._decided = False
        self._use: FolderUse | None = None
        self.plan: KvPlan | None = None

    def decide(self, policy_path: Path) -> KvPlan | None:
        """The plan; blocks for about a tenth of a second the first time."""
        if not self._decided:
            run = self._run
            plan = plan_kv(run.run_id, policy_path, run.policy.context, run.serving, self._cell, self._spare)
            if plan is not None:
                try:
                    self._use = FolderUse(plan.folder)
                except OSError as error:
                    log.warning("kv: nothing moves between cells, %s cannot be held: %s", plan.folder, error)
                    plan = None
            self.plan, self._decided = plan, True
        return self.plan

    def close(self) -> None:
        """Let the folder go: the last cell to do so removes it. The server must have ended."""
        if self._use is not None:
            self._use.close()
            self._use = None
        self._decided = False
