"""The elastic policy: cells move to training as the water level falls, and back as it rises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gyre.scheduling.types import CellView, ClusterView, Decision


@dataclass(frozen=True)
class ElasticPolicy:
    """Serving comes first; what serving does not need may train.

    With S the cells that serve and c(S) the rollouts they can hold:

    - a cell leaves S only if c(S without it) >= (1 + hysteresis) * water level, and some cell stays while the level
      is above zero; the central cell leaves first, then satellites, the smallest first;
    - one cell is wanted in training for every `min_backlog_tokens` of backlog, and the central one whenever a step is
      closed, since only it can take the optimizer step;
    - satellites come back when the level exceeds c(S); the central cell too, unless there is work for it and another
      cell serves; every cell comes back when no step is open.

    A cell that left under the first rule comes back only after the level has grown by the hysteresis, so a level
    that wavers moves nothing.
    """

    min_backlog_tokens: int = 2048
    hysteresis: float = 0.125

    def decide(self, view: ClusterView) -> Mapping[str, Decision]:
        decisions = {c.name: Decision(c.heading, "as it is") for c in view.cells}
        if view.steps_open == 0:
            return {c.name: Decision("rollout", "nothing to train") for c in view.cells}
        heading_serve = [c for c in view.cells if c.heading == "rollout"]
        capacity = sum(c.max_running for c in heading_serve)
        if view.water_level > 0 and (not heading_serve or view.water_level > capacity):
            return decisions | self._come_back(view, capacity, bool(heading_serve))
        return decisions | self._leave(view)

    def _come_back(self, view: ClusterView, capacity: int, served: bool) -> dict[str, Decision]:
        back: dict[str, Decision] = {}
        has_work = view.steps_closed > 0 or view.backlog_tokens > 0
        for cell in sorted((c for c in view.cells if c.heading == "train"), key=_leaving_order, reverse=True):
            if (served and capacity >= view.water_level) or (cell.central and has_work and served):
                continue
            back[cell.name] = Decision("rollout", f"water level {view.water_level} exceeds capacity {capacity}")
            capacity, served = capacity + cell.max_running, True
        return back

    def _leave(self, view: ClusterView) -> dict[str, Decision]:
        leave: dict[str, Decision] = {}
        wanted = view.backlog_tokens // max(1, self.min_backlog_tokens)
        missing = wanted - sum(c.heading == "train" for c in view.cells)
        servers = sum(c.role == "rollout" for c in view.cells)
        capacity = sum(c.max_running for c in view.cells if c.role == "rollout")
        needed = view.water_level * (1 + self.hysteresis)
        for cell in sorted((c for c in view.cells if c.heading == "rollout"), key=_leaving_order):
            takes_optimizer_step = cell.central and view.steps_closed > 0
            if missing <= 0 and not takes_optimizer_step:
                continue
            serves = cell.role == "rollout"  # one that is still on its way back holds nothing yet
            stays, remaining = servers - serves, capacity - cell.max_running * serves
            if view.water_level > 0 and (remaining < needed or stays < 1):
                break
            why = f"{view.backlog_tokens} tokens to train" + (", step closed" if view.steps_closed else "")
            leave[cell.name] = Decision("train", f"{why}; {remaining} slots hold water level {view.water_level}")
            servers, capacity, missing = stays, remaining, missing - 1
        return leave


def _leaving_order(cell: CellView) -> tuple[bool, int, str]:
    return (not cell.central, cell.max_running, cell.name)
