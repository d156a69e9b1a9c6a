"""The colocate baseline: every cell serves until no rollout is left, then every cell trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gyre.scheduling.types import ClusterView, Decision, Role


@dataclass(frozen=True)
class ColocatePolicy:
    """One phase for all cells. The cells' own roles remember the phase, so the policy keeps no state."""

    def decide(self, view: ClusterView) -> Mapping[str, Decision]:
        work = view.steps_closed > 0
        training = any(c.heading == "train" for c in view.cells)
        role: Role
        if work and (view.water_level == 0 or training):
            role, reason = "train", "every rollout is settled: all train"
        else:
            role, reason = "rollout", "rollouts are live" if view.water_level else "nothing to train"
        return {c.name: Decision(role, reason) for c in view.cells}
