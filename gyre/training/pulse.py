"""Whether the other ranks of a trainer on this machine run: each says so every few seconds through a pipe.

A rank that dies ends all; one that lives and does not run (it was stopped) would keep the others inside a collective
until torch gives up, half an hour later.
"""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

PIPE = "GYRE_TRAINER_PULSE"
"""Environment variable: the file descriptor through which a rank says that it runs."""
BEAT_S = 5.0
SILENT_S = 60.0
"""A rank from which nothing was heard for so long does not run. As long as an agent waits for its trainer."""


def start_rank(
    argv: Sequence[str], env: Mapping[str, str], setup: Callable[[], None]
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a rank, which must call `beat`; the process, and the end of the pipe at which `end_of` listens."""
    heard, said = os.pipe()
    process = subprocess.Popen(
        argv, env={**env, PIPE: str(said)}, stdin=subprocess.DEVNULL, preexec_fn=setup, pass_fds=(said,)
    )
    os.close(said)
    return process, heard


def beat(every_s: float = BEAT_S) -> None:
    """Say from now on, on a thread of its own, that this process runs; nothing where nobody listens."""
    if PIPE in os.environ:
        threading.Thread(target=_beat, args=(int(os.environ[PIPE]), every_s), daemon=True).start()


def _beat(said: int, every_s: float) -> NoReturn:
    while True:
        os.write(said, b".")
        time.sleep(every_s)


def end_of(process: subprocess.Popen[bytes], heard: int, *, every_s: float = BEAT_S, silent_s: float = SILENT_S) -> str:
    """Return when the rank has ended, or has not run for `silent_s` seconds: which of the two, in words."""
    ended = os.pidfd_open(process.pid)  # not the pipe's end: a grandchild that was forked may hold it open
    try:
        return _end_of(process, heard, ended, every_s, silent_s)
    finally:
        os.close(ended)


def _end_of(process: subprocess.Popen[bytes], heard: int, ended: int, every_s: float, silent_s: float) -> str:
    silent = 0.0  # by the beats that were awaited: if all of this machine sleeps, nobody is late
    while silent < silent_s:
        ready = select.select([heard, ended], [], [], every_s)[0]
        if not ready:
            silent += every_s
        elif ended not in ready and os.read(heard, 1 << 12):
            silent = 0.0
        else:
            return f"ended with code {process.wait()}"
    return f"did not run for {silent_s:.0f} s"
