"""Restarting a process that died: at once the first time, then more slowly; giving up on one that never starts."""

from __future__ import annotations

import time


class BackOff:
    """Seconds to wait before the next start: 0, then 1, 2, 4 … `longest`; anew after a life of `settled_s`."""

    def __init__(self, longest: float = 30.0, settled_s: float = 60.0) -> None:
        self._longest, self._settled_s = longest, settled_s
        self._deaths = 0
        self._born = time.monotonic()

    def started(self) -> None:
        """A process was started now."""
        self._born = time.monotonic()

    def died(self) -> float:
        """It is dead; how long to wait."""
        if time.monotonic() - self._born > self._settled_s:
            self._deaths = 0
        self._deaths += 1
        return 0.0 if self._deaths == 1 else min(self._longest, float(2 ** (self._deaths - 2)))


START_TRIES = 5
"""Starts in a row, none of them ever successful, after which a process counts as unable to start here. With their
pauses they outlast a database that is being restarted."""


class CannotStart(Exception):
    """A process that ends by itself at every start: settings or the machine are to blame, and people must look."""


class FirstStart:
    """Tells a process that dies from one that has never lived, which no restart helps."""

    def __init__(self, what: str) -> None:
        self._what, self._vain = what, 0

    def worked(self) -> None:
        """It was ready: from now on every end is a death."""
        self._vain = -1

    def failed(self, code: int | None, why: str) -> None:
        """A start has failed; `code` is negative where a signal ended it, None where nothing ran.

        Raises CannotStart at the last try, in one line.
        """
        if self._vain < 0 or (code is not None and code <= 0):
            return
        self._vain += 1
        if self._vain >= START_TRIES:
            raise CannotStart(f"{self._what} cannot start: {' '.join(why.split())}")
