"""`python -m workers.stack.janitor DATA PID`: ends what a killed supervisor, of that pid, leaves behind.

Its standard input is a pipe that only the supervisor holds open. When that ends without the word "bye", the
supervisor was killed, and every process of the stack at DATA is ended.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from workers.stack.lock import StackLock
from workers.stack.sweep import sweep


def main(data: Path, supervisor: int) -> None:
    """Wait for the supervisor's end, then clean up if need be."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read().endswith(b"bye"):
        return
    lock = StackLock(data)
    while (holder := lock.acquire()) is not None:
        if holder not in (supervisor, 0):
            return  # a new supervisor is there already, and has swept before it started anything
        time.sleep(0.02)  # the kernel closes the pipe of one that was killed before it gives its lock back
    sweep(data, grace_s=3.0)
    lock.release()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
