"""What a simulated run keeps of its steps and cells."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gyre.scheduling import Phase, Role
from gyre.simulation.model import Floats, StepWork


class StepState:
    """A step's progress. A group is handed out when all its members are settled, or, with a quorum, from then on member
    by member."""

    def __init__(self, index: int, work: StepWork, quorum: int | None) -> None:
        self.index, self.work = index, work
        groups, size = work.tokens.shape
        self.quorum = size if quorum is None else min(quorum, size)
        self.queued = deque(range(groups * size))
        self.size = size
        self.live: dict[int, float] = {}
        """Launch times of the rollouts that run."""
        self.settled = [0] * groups
        self.waiting = [0.0] * groups
        """Tokens of settled members of a group that is not handed out."""
        self.open_groups = groups
        self.backlog = 0.0
        self.computing = 0
        self.left: int = groups * size

    @property
    def closed(self) -> bool:
        return self.left == 0

    def settle(self, rollout: int, trained: float) -> None:
        group = rollout // self.size
        del self.live[rollout]
        self.left -= 1
        self.settled[group] += 1
        self.waiting[group] += trained
        if self.settled[group] == self.size:
            self.open_groups -= 1
        if self.settled[group] >= self.quorum:
            self.backlog += self.waiting[group]
            self.waiting[group] = 0.0


@dataclass(eq=False)
class CellState:
    """A cell and its rollouts. `tool` and `tokens` are what is left of each."""

    index: int
    role: Phase = "rollout"
    told: Role = "rollout"
    busy: bool = False
    members: list[tuple[StepState, int]] = field(default_factory=list)
    tool: Floats = field(default_factory=lambda: np.empty(0))
    tokens: Floats = field(default_factory=lambda: np.empty(0))
    deadline: Floats = field(default_factory=lambda: np.empty(0))
    at: float = 0.0
    """When `tool` and `tokens` were last brought up to date."""
    stamp: int = 0
    since: float = 0.0
    state: str = "serve idle"

    def drop(self, which: NDArray[np.bool_]) -> None:
        """Forget the members at which `which` is true."""
        stay = ~which
        self.members = [m for m, stays in zip(self.members, stay.tolist(), strict=True) if stays]
        self.tool, self.tokens, self.deadline = self.tool[stay], self.tokens[stay], self.deadline[stay]

    @property
    def phase(self) -> Phase:
        """Its role as a policy sees it: one that was told to change is on its way."""
        if self.role == self.told:
            return self.role
        return "to_train" if self.told == "train" else "to_rollout"

    @property
    def free(self) -> bool:
        return self.role == "rollout" and self.told == "rollout"


class Arrival(NamedTuple):
    """A rollout on its way to a cell, with what is left of it."""

    step: StepState
    rollout: int
    tool_s: float
    tokens: float
    deadline: float
