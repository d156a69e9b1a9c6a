"""What a simulated run keeps of its steps and cells."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gyre.scheduling import Phase, Role
from gyre.simulation.model import CostModel, Floats, StepWork


class StepState:
    """A step's progress. A group is handed out when all its members are settled, or, with a quorum, in parts: when so
    many are, and from then on member by member."""

    def __init__(self, index: int, work: StepWork, quorum: int | None) -> None:
        self.index, self.work = index, work
        groups, size = (int(n) for n in work.tokens.shape)
        self.quorum: int = size if quorum is None else min(quorum, size)
        self.queued = deque(range(groups * size))
        self.size = size
        self.live: dict[int, float] = {}
        """Launch times of the rollouts that are under way."""
        self.settled: list[int] = [0] * groups
        self.waiting: list[float] = [0.0] * groups
        """Tokens of settled members of a group that is not handed out."""
        self.open_groups: int = groups
        self.queue: deque[float] = deque()
        """Tokens of each micro-batch that nobody computes."""
        self.backlog = 0.0
        self.computing = 0

    @property
    def closed(self) -> bool:
        return self.open_groups == 0

    def settle(self, rollout: int, trained: float) -> float | None:
        """A rollout is settled. The tokens that its group may hand out now, or None."""
        group = rollout // self.size
        del self.live[rollout]
        self.settled[group] += 1
        self.waiting[group] += trained
        if self.settled[group] < self.quorum:
            return None
        tokens, self.waiting[group] = self.waiting[group], 0.0
        return tokens

    def hand_out(self, tokens: float, micro_batch: float, last: bool) -> None:
        """Put `tokens` into the queue, in micro-batches of at most `micro_batch`; `last`: of its group."""
        self.open_groups -= last
        self.backlog += tokens
        whole, rest = divmod(tokens, micro_batch)
        self.queue.extend([micro_batch] * int(whole))
        if rest > 0:
            self.queue.append(rest)


@dataclass(eq=False)
class CellState:
    """A cell and its rollouts: of each the tool seconds and tokens that it came with, the part of them that is left
    (both shrink evenly), when its time is up, and the part that it does in a second as the batch is now."""

    index: int
    role: Phase = "rollout"
    told: Role = "rollout"
    busy: bool = False
    members: list[tuple[StepState, int]] = field(default_factory=list)
    tool: Floats = field(default_factory=lambda: np.empty(0))
    tokens: Floats = field(default_factory=lambda: np.empty(0))
    left: Floats = field(default_factory=lambda: np.empty(0))
    deadline: Floats = field(default_factory=lambda: np.empty(0))
    speed: Floats = field(default_factory=lambda: np.empty(0))
    token_s: float = 0.0
    at: float = 0.0
    """When `left` was last brought up to date."""
    stamp: int = 0
    since: float = 0.0
    state: str = "serve idle"

    def advance(self, now: float) -> None:
        """Bring the rollouts up to date."""
        passed, self.at = now - self.at, now
        if passed > 0 and self.members:
            self.left -= passed * self.speed

    def set_speed(self, cost: CostModel) -> None:
        """How fast the rollouts go, all together.

        A rollout generates for the part p = n t / (T + n t) of its time, with T its tool seconds, n its tokens and t
        the seconds a token at the batch that it meets when it does: itself and, of the others, those that generate
        too, 1 + (1 - 1/m) * sum(p) for m rollouts (mean value analysis of a closed queue, by the arrival theorem). t is
        the fixed point, found by Newton's method from where the batch stood before.
        """
        members = len(self.members)
        if not members:
            return
        tool, tokens, others = self.tool, self.tokens, 1.0 - 1.0 / members
        t = max(self.token_s, cost.token_s(1.0))
        for _ in range(30):
            speed = 1.0 / np.maximum(tool + tokens * t, 1e-300)
            share = speed * tokens
            batch = 1.0 + others * t * float(share.sum())
            met = cost.token_s(batch)
            full = cost.decode_s + cost.decode_s_per_rollout * cost.slots
            slope = cost.decode_s_per_rollout if batch <= cost.slots else full / cost.slots
            slope *= others * float((share * tool).dot(speed))  # d met / d t
            step = (met - t) / max(1.0 - slope, 0.05)
            t = max(t + step, cost.decode_s * 0.5)
            if abs(step) <= 1e-7 * t:
                break
        self.token_s = t
        self.speed = 1.0 / np.maximum(tool + tokens * t, 1e-300)

    def join(self, arrivals: list[Arrival]) -> None:
        """New members. The cell is up to date."""
        self.members += [(a[0], a[1]) for a in arrivals]
        self.tool = np.concatenate([self.tool, [a[2] for a in arrivals]])
        self.tokens = np.concatenate([self.tokens, [a[3] for a in arrivals]])
        self.deadline = np.concatenate([self.deadline, [a[4] for a in arrivals]])
        self.left = np.concatenate([self.left, np.ones(len(arrivals))])

    def drop(self, which: NDArray[np.bool_]) -> None:
        """Forget the members at which `which` is true."""
        stay = ~which
        self.members = [m for m, stays in zip(self.members, stay.tolist(), strict=True) if stays]
        self.tool, self.tokens, self.left = self.tool[stay], self.tokens[stay], self.left[stay]
        self.deadline, self.speed = self.deadline[stay], self.speed[stay]

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
