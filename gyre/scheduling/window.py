"""Sharing the launch window: how many rollouts each open step or evaluation may have under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Demand:
    """One source of rollouts. Lower `order` is older and comes first; `window` is what it was given already."""

    source: str
    order: int
    queued: int
    running: int
    window: int = 0

    @property
    def committed(self) -> int:
        """Rollouts that run, or that the source may launch without asking again, whenever it was heard of last."""
        return max(self.running, min(self.window, self.running + self.queued))


def share_window(max_concurrent: int, demands: Sequence[Demand]) -> dict[str, int]:
    """Rollouts that each source may have running: the oldest gets all it can use, the next what is left.

    What was given is not taken back, so a share is never below what is committed, and the shares exceed
    `max_concurrent` only by what was committed beyond it.
    """
    free = max_concurrent - sum(d.committed for d in demands)
    shares: dict[str, int] = {}
    for demand in sorted(demands, key=lambda d: (d.order, d.source)):
        more = max(0, min(free, demand.running + demand.queued - demand.committed))
        shares[demand.source] = demand.committed + more
        free -= more
    return shares
