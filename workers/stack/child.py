"""One process that the supervisor owns: how it is started, and what is known of it."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from gyre.cli.stackfile import ProcessPhase, ProcessState
from workers.stack.health import Check, alive

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class ChildSpec:
    """What to run and how to know that it is well."""

    name: str
    argv: list[str]
    component: str
    """Component under which its CPU time is counted."""
    env: dict[str, str] = field(default_factory=dict)
    """Added to the supervisor's own environment."""
    cell: str | None = None
    cwd: Path | None = None
    ready: Check = alive
    ready_within_s: float = 300.0
    """Seconds after which a process that is not ready is taken for stuck, ended, and started again."""
    stop_signal: signal.Signals = signal.SIGTERM
    stop_within_s: float = 10.0
    """Seconds after `stop_signal` before SIGKILL."""
    leans_on_others: bool = False
    """It uses the other processes of its stage, so it ends before them."""
    once: bool = False
    """It does a task and ends: ready means that it has ended with code 0."""


class Child:
    """The living (or not) process of a ChildSpec. Its exit is reported by the supervisor, which reaps all children."""

    def __init__(self, spec: ChildSpec, log: Path) -> None:
        self.spec = spec
        self.log = log
        self.pid: int | None = None
        self.started_at = 0.0
        self.exit_code: int | None = None
        self.phase: ProcessPhase = "waiting"
        self.detail = ""
        self.since = time.time()
        self.restarts = 0
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Started and not reaped yet."""
        return self.pid is not None and self.exit_code is None

    def set_phase(self, phase: ProcessPhase, detail: str = "") -> None:
        """Note a new phase, or a new detail of the same one."""
        if phase != self.phase:
            self.since = time.time()
        self.phase, self.detail = phase, detail

    def start(self) -> None:
        """Start the process in a session of its own. It gets `stop_signal` when the supervisor dies."""
        env = {**os.environ, **self.spec.env}
        parent, last_word = os.getpid(), int(self.spec.stop_signal)

        def in_child() -> None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, last_word, 0, 0, 0)
            if os.getppid() != parent:  # the supervisor died before the line above
                os.kill(os.getpid(), signal.SIGKILL)

        self.started_at = time.time()
        with self.log.open("ab") as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} start of {self.spec.name}\n".encode())
            log.flush()
            self._popen = subprocess.Popen(
                self.spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=self.spec.cwd,
                # Its own session: Ctrl-C in a terminal must reach the supervisor alone, which ends all in order.
                start_new_session=True,
                preexec_fn=in_child,
            )
        self.pid, self.exit_code = self._popen.pid, None
        self.set_phase("starting")

    def reaped(self, exit_code: int) -> None:
        """Take note of the end; negative codes are signals, as in `subprocess`."""
        self.exit_code = exit_code
        if self._popen is not None:
            self._popen.returncode = exit_code  # else Popen would wait for a pid that may be another's by then

    def send(self, number: int) -> None:
        """Signal the process if it runs."""
        if self.running and self.pid is not None:
            os.kill(self.pid, number)  # not reaped yet, so the pid is still its own

    def how_it_ended(self) -> str:
        """`ended with code 1` or `was killed by SIGKILL`, and the last line that it logged."""
        code = self.exit_code or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        last = last_line(self.log)
        return f"{how}; its log ends: {last}" if last else how

    def state(self) -> ProcessState:
        """As written to stack.json."""
        return ProcessState(
            name=self.spec.name,
            component=self.spec.component,
            cell=self.spec.cell,
            pid=self.pid if self.running else None,
            state=self.phase,
            detail=self.detail,
            restarts=self.restarts,
            since=self.since,
            log=str(self.log),
        )


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, instead of init: none can get lost."""
    if sys.platform != "linux" or _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("the local stack needs Linux (PR_SET_CHILD_SUBREAPER)")


def last_line(log: Path) -> str:
    """The last line that says something since the last start noted in the log, at most 300 characters."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 4096))
        text = file.read().decode(errors="replace")
    since_start = re.split(r"^--- .* start of .*$", text, flags=re.MULTILINE)[-1]
    said = [line.strip() for line in since_start.splitlines() if line.strip()]
    return said[-1][:300] if said else ""
