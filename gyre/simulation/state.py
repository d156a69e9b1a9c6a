"""What a simulated run keeps of its steps and cells."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gyre.scheduling import CellView, Phase, Role
from gyre.simulation.model import CostModel, Floats, StepWork

_least = np.minimum.reduce  # `min` of so few numbers takes twice as long
TOOL, TOKENS, LEFT, DEADLINE, SPEED, PRODUCT = range(6)


class StepState:
    """A step's progress. A group is complete when all its members are settled, or as many with a reward as there are
    without `over_submit`. It is handed out then, or, with a quorum, in parts: when so many have a reward, and from then
    on member by member."""

    def __init__(self, index: int, work: StepWork, quorum: int | None, over_submit: int = 0) -> None:
        self.index, self.work = index, work
        groups, size = (int(n) for n in work.tokens.shape)
        # Read one by one at every event, for which an array is the slower place.
        self.tokens: list[float] = work.tokens.ravel().tolist()
        self.trained: list[float] = work.trained.ravel().tolist()
        self.wanted: int = size - over_submit
        self.quorum: int = self.wanted if quorum is None else min(quorum, self.wanted)
        self.queued = deque(range(groups * size))
        self.size = size
        self.live: dict[int, float] = {}
        """Launch times of the rollouts that are under way."""
        self.cell_of: dict[int, CellState] = {}
        """The cell that each rollout came to last."""
        self.scoring: dict[int, float] = {}
        """Sampled tokens of the live rollouts that have left their cells by themselves."""
        self.settled: list[int] = [0] * groups
        self.rewarded: list[int] = [0] * groups
        self.waiting: list[float] = [0.0] * groups
        """Tokens of settled members of a group that is not handed out."""
        self.open_groups: int = groups
        self.queue: deque[float] = deque()
        """Tokens of each micro-batch that nobody computes."""
        self.backlog = 0.0
        self.computing = 0
        self.settled_at = 0.0
        self.longest_s = 0.0
        """Seconds that the longest of the rollouts that are over took."""

    @property
    def closed(self) -> bool:
        return self.open_groups == 0

    def settle(self, rollout: int, trained: float, now: float) -> float | None:
        """A rollout is settled. The tokens that its group may hand out now, or None."""
        group, rewarded = rollout // self.size, self.work.rewarded
        self.longest_s = max(self.longest_s, now - self.live.pop(rollout))
        self.scoring.pop(rollout, None)
        self.settled_at = now
        self.settled[group] += 1
        self.rewarded[group] += rewarded is None or bool(rewarded.flat[rollout] > 0)
        self.waiting[group] += trained
        if self.rewarded[group] < self.quorum and not self.complete(group):
            return None
        tokens, self.waiting[group] = self.waiting[group], 0.0
        return tokens

    def complete(self, group: int) -> bool:
        """Whether nobody of the group is waited for."""
        return self.rewarded[group] >= self.wanted or self.settled[group] == self.size

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
    """A cell and its rollouts. The columns of `work` are theirs, its rows: the tool seconds and the tokens that each
    came with, the part of them that is left (both shrink evenly), when its time is up, the part that it does in a
    second as the batch is now, and the product of the first two. One array, since a batch changes at every event."""

    index: int
    role: Phase = "rollout"
    told: Role = "rollout"
    busy: bool = False
    members: list[tuple[StepState, int]] = field(default_factory=list)
    work: Floats = field(default_factory=lambda: np.empty((6, 0)))
    token_s: float = 0.0
    at: float = 0.0
    """When what is left was last brought up to date."""
    stamp: int = 0
    since: float = 0.0
    state: str = "serve idle"

    def advance(self, now: float) -> None:
        """Bring the rollouts up to date."""
        passed, self.at = now - self.at, now
        if passed > 0 and self.members:
            left = self.work[LEFT]
            left -= passed * self.work[SPEED]

    def ends_after(self, now: float) -> float:
        """Seconds until the first of its rollouts ends, as the batch is."""
        first = float(_least(self.work[LEFT] / self.work[SPEED]))
        return max(0.0, min(first, float(_least(self.work[DEADLINE])) - now))

    def ended(self, now: float) -> NDArray[np.bool_]:
        """Which of its rollouts are at their end. The cell is up to date."""
        done = self.work[LEFT] <= 1e-9 * self.work[SPEED]
        out: NDArray[np.bool_] = done | (self.work[DEADLINE] <= now + 1e-9)
        return out

    def set_speed(self, cost: CostModel) -> None:
        """How fast the rollouts go, all together.

        A rollout generates for the part p = n t / (T + n t) of its time, with T its tool seconds, n its tokens and t
        the seconds a token at the batch that it meets when it does: itself and, of the others, those that generate
        too, 1 + (1 - 1/m) * sum(p) for m rollouts (mean value analysis of a closed queue, by the arrival theorem). t is
        the fixed point, found by Newton's method from where the batch stood before, to about one part in 1e5.
        """
        tool, tokens, product = self.work[TOOL], self.work[TOKENS], self.work[PRODUCT]
        others = 1.0 - 1.0 / len(self.members)
        decode, each, slots = cost.decode_s, cost.decode_s_per_rollout, cost.slots
        full = (decode + each * slots) / slots
        t = max(self.token_s, cost.token_s(1.0))
        for _ in range(40):
            speed = 1.0 / (tool + tokens * t)
            batch = 1.0 + others * t * float(speed.dot(tokens))
            at_batch, slope = (decode + each * batch, each) if batch <= slots else (full * batch, full)  # `token_s`
            slope *= others * float((speed * speed).dot(product))  # of what it meets, by t
            step = (at_batch - t) / max(1.0 - slope, 0.05)
            t = max(t + step, 0.5 * decode)
            if abs(step) <= 5e-3 * t:  # it converges quadratically
                break
        self.token_s = t
        self.work[SPEED] = 1.0 / (tool + tokens * t)

    def join(self, arrivals: list[Arrival]) -> None:
        """New members. The cell is up to date."""
        self.members += [(a.step, a.rollout) for a in arrivals]
        # No rollout takes no time at all: its speed would have no value.
        new = np.array([[s := max(a.tool_s, 1e-12), a.tokens, 1.0, a.deadline, 0.0, s * a.tokens] for a in arrivals]).T
        self.work = np.concatenate([self.work, new], axis=1)

    def drop(self, which: NDArray[np.bool_]) -> None:
        """Forget the members at which `which` is true."""
        for i in reversed(which.nonzero()[0].tolist()):
            del self.members[i]
        self.work = self.work.compress(~which, axis=1)

    def leaver(self, i: int, prefill_tokens_s: float) -> Arrival:
        """What is left of its i-th rollout when it goes elsewhere, where its context is computed again."""
        step, rollout = self.members[i]
        tool, tokens, left, deadline, *_ = self.work[:, i].tolist()
        left = max(0.0, left)
        prefill = float(step.work.context.flat[rollout]) / prefill_tokens_s
        return Arrival(step, rollout, tool * left + prefill, tokens * left, deadline)

    def sampled(self, i: int) -> float:
        """The part of its i-th rollout's tokens that are sampled, the cells before this one included."""
        step, rollout = self.members[i]
        whole = step.tokens[rollout]
        return 1.0 if whole == 0 else 1.0 - float(self.work[TOKENS, i]) * max(0.0, float(self.work[LEFT, i])) / whole

    def view(self, name: str, slots: int) -> CellView:
        """As a policy sees it."""
        return CellView(name, self.index == 0, self.phase, slots, len(self.members))

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
