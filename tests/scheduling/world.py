"""A small world that a policy drives: groups, a launch window, cells that take time to change, a queue of training.

Every event's order and every duration comes from a seeded source, so a failing example is found again.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

from gyre.scheduling import CellView, ClusterView, Demand, Policy, share_window

TOKENS = 100  # of one rollout


@dataclass
class Step:
    index: int
    groups: list[list[float]]  # durations of the members
    queued: list[tuple[int, float]] = field(default_factory=list)
    running: int = 0
    left: dict[int, int] = field(default_factory=dict)  # group -> members not settled
    handed: int = 0
    backlog: int = 0  # micro-batches
    done: bool = False

    @property
    def closed(self) -> bool:
        return self.handed == len(self.groups)


@dataclass
class World:
    policy: Policy
    capacity: list[int]
    steps: list[list[list[float]]]
    staleness: int
    window: int
    switch_s: float
    train_s: float
    chance: random.Random
    now: float = 0.0
    under_served: list[str] = field(default_factory=list)
    starved: list[str] = field(default_factory=list)
    trained: int = 0
    switches: int = 0

    def __post_init__(self) -> None:
        self.role = {f"c{i}": "rollout" for i in range(len(self.capacity))}
        self.told = dict.fromkeys(self.role, "rollout")
        self.events: list[tuple[float, int, str, object]] = []
        self.count = itertools.count()
        self.open: list[Step] = []
        self.next = 0
        self.busy: set[str] = set()

    # ---- what the policy sees ---------------------------------------------------------------------------------------

    def view(self) -> ClusterView:
        cells = tuple(
            CellView(name, i == 0, self.role[name] if self.role[name] == self.told[name] else f"to_{self.told[name]}",
                     self.capacity[i])  # type: ignore[arg-type]
            for i, name in enumerate(self.role)
        )  # fmt: skip
        return ClusterView(
            cells=cells,
            water_level=sum(len(s.queued) + s.running for s in self.open),
            backlog_tokens=sum(s.backlog for s in self.open) * TOKENS,
            open_groups=sum(len(s.groups) - s.handed for s in self.open),
            steps_open=len(self.open),
            steps_closed=sum(s.closed for s in self.open),
        )

    # ---- what happens -----------------------------------------------------------------------------------------------

    def at(self, after: float, what: str, whom: object) -> None:
        heapq.heappush(self.events, (self.now + after, next(self.count), what, whom))

    def run(self, most: int = 3000) -> None:
        """To the end; raises AssertionError where work is left and nothing will ever happen."""
        self.settle_down()
        for _ in range(most):
            if self.next == len(self.steps) and not self.open:
                return
            assert self.events, f"work is left and nobody does it: {self.view()}"
            self.now, _, what, whom = heapq.heappop(self.events)
            getattr(self, what)(whom)
            self.settle_down()
        raise AssertionError(f"no end after {most} events: {self.view()}")

    def settle_down(self) -> None:
        """Everything that needs no time: open steps, launch, ask the policy, start training."""
        while self.next < len(self.steps) and len(self.open) <= self.staleness:
            step = Step(self.next, self.steps[self.next])
            step.queued = [(g, d) for g, members in enumerate(step.groups) for d in members]
            step.left = {g: len(members) for g, members in enumerate(step.groups)}
            self.open.append(step)
            self.next += 1
        self.launch()
        self.decide()
        self.train()
        first = self.open[0] if self.open else None
        if first and first.closed and not first.backlog and not self.busy and self.role["c0"] == "train":
            self.open.pop(0)  # the optimizer step
            self.settle_down()

    def launch(self) -> None:
        demands = [Demand(str(s.index), s.index, len(s.queued), s.running) for s in self.open]
        shares = share_window(self.window, demands)
        for step in self.open:
            while step.queued and step.running < shares[str(step.index)]:
                group, duration = step.queued.pop(0)
                step.running += 1
                self.at(duration, "rollout_ends", (step, group))

    def decide(self) -> None:
        before = self.view()
        for name, decision in self.policy.decide(before).items():
            if decision.role == self.told[name]:
                continue
            self.told[name] = decision.role
            self.switches += 1
            self.at(0.0, "may_change", name)
        after = self.view()
        left = {c.name for c in before.cells if c.role == "rollout"} - {
            c.name for c in after.cells if c.role == "rollout"
        }
        if left and before.water_level:
            stays = sum(c.max_running for c in after.cells if c.role == "rollout")
            if stays < before.water_level:
                self.under_served.append(f"{left} left {stays} slots for {before.water_level} at {self.now:.1f}")
        if before.water_level and not any(c.heading == "rollout" for c in after.cells):
            self.starved.append(f"no cell serves {before.water_level} at {self.now:.1f}")

    def may_change(self, name: object) -> None:
        """A change begins unless one is under way or a micro-batch is computed; then it begins afterwards."""
        assert isinstance(name, str)
        if self.role[name] in ("rollout", "train") and self.role[name] != self.told[name] and name not in self.busy:
            self.role[name] = f"to_{self.told[name]}"
            self.at(self.switch_s * self.chance.uniform(0.5, 1.5), "changed", name)

    def changed(self, name: object) -> None:
        assert isinstance(name, str)
        self.role[name] = self.role[name].removeprefix("to_")
        self.at(0.0, "may_change", name)

    def rollout_ends(self, whom: object) -> None:
        step, group = whom  # type: ignore[misc]
        # A call waits for as long as no cell serves: only time passes for the harness.
        if not any(role == "rollout" for role in self.role.values()):
            self.at(0.5, "rollout_ends", whom)
            return
        step.running -= 1
        step.left[group] -= 1
        if step.left[group] == 0:
            step.handed += 1
            step.backlog += self.chance.choice([0, len(step.groups[group])])  # some groups give no gradient

    def train(self) -> None:
        for name, role in self.role.items():
            step = next((s for s in self.open if s.backlog), None)
            if role == "train" and self.told[name] == "train" and name not in self.busy and step is not None:
                step.backlog -= 1
                self.busy.add(name)
                self.at(self.train_s * self.chance.uniform(0.5, 1.5), "trained_one", (name, step))

    def trained_one(self, whom: object) -> None:
        name, _ = whom  # type: ignore[misc]
        self.busy.discard(name)
        self.trained += 1
        self.at(0.0, "may_change", name)
