"""Sharing the launch window: how many rollouts each open step or evaluation may have under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Demand:
    """One source of rollouts. Lower `order` is older and comes first."""

    source: str
    order: int
    queued: int
    running: int


def share_window(max_concurrent: int, demands: Sequence[Demand]) -> dict[str, int]:
    """Rollouts that each source may have running: the oldest gets all it can use, the next what is left.

    The shares plus what already runs above its share never exceed `max_concurrent` by more than what runs; a share is
    never below what the source runs, for a live rollout is not taken back.
    """
    free = max_concurrent - sum(d.running for d in demands)
    shares: dict[str, int] = {}
    for demand in sorted(demands, key=lambda d: (d.order, d.source)):
        more = max(0, min(free, demand.queued))
        shares[demand.source] = demand.running + more
        free -= more
    return shares
