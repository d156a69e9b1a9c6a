"""Restarting a process that died: at once the first time, then more slowly."""

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
