"""`<data>/stack.json`: what the supervisor tells everybody else. Written by the supervisor only.

Ports stay in it after the stack has ended, so that URLs given to harnesses and people stay valid over restarts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ValidationError

ProcessPhase = Literal["waiting", "starting", "ready", "restarting", "stopping", "stopped", "failed"]
StackPhase = Literal["starting", "ready", "stopping", "stopped", "failed"]


class ProcessState(BaseModel):
    """One process as the supervisor sees it."""

    name: str
    component: str
    """Component that its CPU time is counted under."""
    cell: str | None = None
    pid: int | None = None
    state: ProcessPhase = "waiting"
    detail: str = ""
    """What it is waiting for, or how it ended last."""
    restarts: int = 0
    since: float = 0.0
    """Unix time at which `state` began."""
    log: str = ""
    """Path of its log file."""


class StackState(BaseModel):
    """The whole stack."""

    state: StackPhase
    message: str = ""
    """Why it failed, in one line."""
    pid: int
    """The supervisor."""
    pid_start: int
    """Its start time in clock ticks since boot: tells it from a later process with the same id."""
    run_id: str | None = None
    run_config: str | None = None
    ports: dict[str, int] = {}
    """temporal, ui, temporal_http, temporal_metrics, postgres, gateway."""
    database_url: str = ""
    environment: dict[str, str] = {}
    """What every worker gets: the GYRE_ variables."""
    processes: list[ProcessState] = []

    @property
    def ui_url(self) -> str:
        """Temporal's Web UI."""
        return f"http://127.0.0.1:{self.ports['ui']}"

    @property
    def gateway_url(self) -> str:
        """The gateway."""
        return f"http://127.0.0.1:{self.ports['gateway']}"

    @property
    def alive(self) -> bool:
        """Whether the supervisor that wrote this still runs."""
        return start_ticks(self.pid) == self.pid_start

    @classmethod
    def read(cls, data: Path) -> Self | None:
        """The state in `data`, or None where no stack has ever run or the file is not ours."""
        try:
            return cls.model_validate_json((data / "stack.json").read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def write(self, data: Path) -> None:
        """Replace the file at once, so that no reader meets half of it."""
        partial = data / ".stack.json.partial"
        partial.touch(mode=0o600)  # the database's password is in it
        partial.write_text(self.model_dump_json(indent=1), encoding="utf-8")
        os.replace(partial, data / "stack.json")


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot (proc(5), field 22); None: no such process, or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] == "Z" else int(fields[19])
