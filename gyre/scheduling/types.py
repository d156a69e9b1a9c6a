"""What a scheduling policy sees, and what it answers. Pure data: the workflows and the simulator share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Role = Literal["rollout", "train"]
Phase = Literal["rollout", "to_train", "train", "to_rollout"]


@dataclass(frozen=True)
class CellView:
    """A cell. `max_running` is the number of rollouts that it can serve at once; `role` may be on the way."""

    name: str
    central: bool
    role: Phase
    max_running: int

    @property
    def heading(self) -> Role:
        """The role that it has or is on its way to."""
        return "rollout" if self.role in ("rollout", "to_rollout") else "train"


@dataclass(frozen=True)
class ClusterView:
    """The run at one moment, over all open steps and evaluations.

    `water_level`: rollouts that wait for their launch or run. `backlog_tokens`: tokens handed out for training whose
    gradient no trainer holds yet. `open_groups`: groups of training steps that are not handed out. `steps_open`:
    steps whose optimizer step is not done; `steps_closed`: those of them with every group handed out.
    """

    cells: tuple[CellView, ...]
    water_level: int
    backlog_tokens: int
    open_groups: int
    steps_open: int
    steps_closed: int

    def __post_init__(self) -> None:
        if min(self.water_level, self.backlog_tokens, self.open_groups, self.steps_open, self.steps_closed) < 0:
            raise ValueError(f"a cluster has no negative quantities: {self}")
        if sum(c.central for c in self.cells) != 1:
            raise ValueError("exactly one cell is central")


@dataclass(frozen=True)
class Decision:
    """The role that a cell should have, and why, for people."""

    role: Role
    reason: str


class Policy(Protocol):
    """Roles from a view: a pure function, so that what drives cells can be simulated and tested as it is."""

    def decide(self, view: ClusterView) -> Mapping[str, Decision]:
        """A decision for every cell; for a cell that changes its role now, what it should become next."""
        ...
