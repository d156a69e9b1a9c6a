"""Linux processes, read from /proc: who lives, whose child, how much CPU, and which belong to a data folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """One line of /proc/<pid>/stat. Times are CPU seconds, user and system together."""

    pid: int
    parent: int
    session: int
    start: int
    """Clock ticks since boot; with `pid` the identity of a process."""
    own_s: float
    """Used by the process itself."""
    reaped_s: float
    """Used by its descendants that have ended and were waited for."""
    zombie: bool

    @property
    def key(self) -> tuple[int, int]:
        """Identity that is never used again, unlike the pid alone."""
        return (self.pid, self.start)


def snapshot() -> dict[int, Process]:
    """Every process of the machine, by pid."""
    found: dict[int, Process] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (process := _read(int(entry.name))):
            found[process.pid] = process
    return found


def _read(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name is in parentheses and may hold spaces and parentheses itself.
    f = text[text.rindex(b")") + 2 :].split()
    return Process(
        pid=pid,
        parent=int(f[1]),
        session=int(f[3]),
        start=int(f[19]),
        own_s=(int(f[11]) + int(f[12])) / _TICK,
        reaped_s=(int(f[13]) + int(f[14])) / _TICK,
        zombie=f[0] in (b"Z", b"X"),
    )


def descendants(processes: dict[int, Process], roots: Iterable[int]) -> set[int]:
    """Pids below `roots`, without the roots."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    todo = list(roots)
    while todo:
        for child in children.get(todo.pop(), []):
            if child not in found:
                found.add(child)
                todo.append(child)
    return found


def ancestors(processes: dict[int, Process], pid: int) -> set[int]:
    """Pids above `pid`, without it."""
    found: set[int] = set()
    while (process := processes.get(pid)) and process.parent > 0 and process.parent not in found:
        found.add(process.parent)
        pid = process.parent
    return found


def command_line(pid: int) -> str:
    """Arguments of a process joined by spaces; '' when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def belongs_to(pid: int, data: Path) -> bool:
    """Whether the process was started with GYRE_DATA set to `data` (every process of a stack is, and passes it on)."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return b"\0GYRE_DATA=" + os.fsencode(data) + b"\0" in b"\0" + environment


def of_stack(data: Path, spare: Iterable[int] = (), below: Iterable[int] = ()) -> set[int]:
    """Living processes of the stack at `data`, those below the pids `below`, and all below any of these.

    Without this process, those above it, and `spare`.
    """
    everyone = snapshot()
    me = os.getpid()
    roots = {pid for pid in everyone if pid != me and belongs_to(pid, data)} | set(below)
    kept_out = {me, *ancestors(everyone, me), *spare}
    found = (roots | descendants(everyone, roots)) - kept_out
    return {pid for pid in found if pid in everyone and not everyone[pid].zombie}
