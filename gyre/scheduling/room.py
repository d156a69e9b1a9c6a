"""How many rollouts a slot serves, where they wait for their tools most of the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gyre.scheduling.types import ClusterView, Decision, Policy


def with_room(view: ClusterView, rollouts_per_slot: float, window: int | None) -> ClusterView:
    """The view as a policy should see it where each slot of a cell serves `rollouts_per_slot` rollouts at a time.

    `window`: rollouts that are under way at once at the most. Those that wait for it need no slot, so the level is no
    higher than that. With 1 a view stays as it is: a slot a rollout, whatever the rollout does.
    """
    if rollouts_per_slot == 1:
        return view
    cells = tuple(replace(c, max_running=round(c.max_running * rollouts_per_slot)) for c in view.cells)
    level = view.water_level if window is None else min(view.water_level, window)
    return replace(view, cells=cells, water_level=level)


@dataclass(frozen=True)
class Roomy:
    """`policy`, asked about views `with_room`."""

    policy: Policy
    rollouts_per_slot: float
    window: int | None

    def decide(self, view: ClusterView) -> Mapping[str, Decision]:
        return self.policy.decide(with_room(view, self.rollouts_per_slot, self.window))
