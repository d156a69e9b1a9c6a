"""Ending whatever a stack has left behind, detached harnesses too."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from gyre.cli.stackfile import start_ticks
from gyre.harness.base import BOX
from workers.stack.processes import of_stack


def sweep(
    data: Path,
    grace_s: float,
    *,
    spare: Callable[[], Iterable[int]] = tuple,
    below: Iterable[int] = (),
    limit_s: float = 20.0,
) -> set[int]:
    """End every process of the stack at `data`, and below the pids `below`, except `spare()`.

    SIGTERM first, after `grace_s` seconds SIGKILL. Blocks until none is left. Returns the pids that were met; raises
    TimeoutError when some outlive `limit_s`.
    """
    met: set[int] = set()
    below = {*below, *_shepherds(data)}
    begin = time.monotonic()
    while left := of_stack(data, spare(), below):
        age = time.monotonic() - begin
        if age > limit_s:
            raise TimeoutError(f"processes {sorted(left)} of the stack at {data} do not end; end them by hand")
        for pid in left if age >= grace_s else left - met:
            _send(pid, signal.SIGKILL if age >= grace_s else signal.SIGTERM)
        met |= left
        time.sleep(0.1)
    return met


def _shepherds(data: Path) -> list[int]:
    """Living shepherds of harnesses, by their pid files: an environment that hides GYRE_DATA does not save them."""
    found = []
    for path in _pid_files(data / "rollouts"):
        if not path.with_name("exit.json").exists():
            try:
                note = json.loads(path.read_text(encoding="utf-8"))
                pid, start = int(note["pid"]), int(note["start_time"])
            except (ValueError, KeyError, TypeError):
                continue  # not a shepherd's
            if start_ticks(pid) == start:
                found.append(pid)
    return found


def _pid_files(rollouts: Path) -> Iterator[Path]:
    """Notes of rollouts and graders. Where agents write is not looked into: it is large after a long run, and a file
    there may name anybody's process."""
    for folder, below, files in os.walk(rollouts):
        below[:] = [name for name in below if name != BOX]
        if "pid.json" in files:
            yield Path(folder) / "pid.json"


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it ended between the look and the signal
        return
