"""One stack a data folder: an flock on `<data>/stack.lock`, which the kernel gives back however its holder ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class StackLock:
    """The lock; not inherited by children."""

    def __init__(self, data: Path) -> None:
        self.path = data / "stack.lock"
        self._fd: int | None = None

    def acquire(self) -> int | None:
        """Try to take the lock. None: taken; else the pid that holds it (0: not known)."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.read(fd, 32).decode().strip()
            os.close(fd)
            return int(text) if text.isdigit() else 0
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd
        return None

    def release(self) -> None:
        """Give the lock back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
