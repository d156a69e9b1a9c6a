"""The events: rollouts end, micro-batches end, cells change role, optimizer steps end. Exact between decisions.

The rollouts of one cell share its decode batch, so each arrival and each end changes the speed of the others; a cell's
rollouts are therefore brought up to date whenever its batch changes, and only then.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from gyre.scheduling import CellView, ClusterView, Policy, Rates, expected_tail_s
from gyre.simulation.model import Scenario
from gyre.simulation.state import Arrival, CellState, StepState

STATES = ("serve", "serve idle", "to train", "train", "train idle", "optimizer", "to rollout")


# Rollouts by which a cell may be fuller than another before one moves (as gyre.gateway.routing has it).
AFFINITY = 4


@dataclass(frozen=True)
class Span:
    """What a cell did from `start` to `end` seconds."""

    cell: int
    state: str
    start: float
    end: float


@dataclass(frozen=True)
class Outcome:
    """A simulated run. `cell_s` sums the cells' seconds by state; `ends` are the steps' ends; `spans` the timeline,
    where it was asked for."""

    seconds: float
    ends: tuple[float, ...]
    cell_s: Mapping[str, float]
    switches: int
    moved: int
    """Rollouts that a leaving cell handed to another."""
    events: int
    spans: tuple[Span, ...] = ()


def simulate(
    scenario: Scenario,
    policy: Policy,
    *,
    staleness: int = 0,
    quorum: int | None = None,
    decide_s: float = 1.0,
    timeline: bool = False,
) -> Outcome:
    """Run `scenario` under `policy` with at most `staleness + 1` steps open.

    `quorum`: settled members from which a group trains (None: all of them). `decide_s`: the policy is asked at most
    once in so many seconds. Raises RuntimeError where work is left that nothing will ever do: a fault of the policy.
    """
    if staleness < 0 or (quorum is not None and quorum < 1) or decide_s < 0:
        raise ValueError("staleness and decide_s must not be negative, a quorum at least 1")
    return _Run(scenario, policy, staleness, quorum, decide_s, timeline).run()


class _Run:
    def __init__(
        self, scenario: Scenario, policy: Policy, staleness: int, quorum: int | None, decide_s: float, timeline: bool
    ) -> None:
        self.scenario, self.cost, self.policy = scenario, scenario.cost, policy
        self.staleness, self.quorum, self.decide_s, self.timeline = staleness, quorum, decide_s, timeline
        self.now = 0.0
        self.cells = [CellState(i) for i in range(scenario.cells)]
        self.names = {f"c{i}": cell for i, cell in enumerate(self.cells)}
        self.open: list[StepState] = []
        self.begun = 0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.ends: list[float] = []
        self.homeless: deque[Arrival] = deque()
        self.idle_trainers: set[int] = set()
        self.optimizing = False
        self.next_decision = 0.0
        self.decision_due = False
        self.cell_s = dict.fromkeys(STATES, 0.0)
        self.spans: list[Span] = []
        self.switches = self.moved = self.count = 0
        c = self.cost
        self.rates = Rates(c.train_tokens_s, c.to_train_s, c.to_rollout_s)

    def run(self) -> Outcome:
        self._open_steps()
        self._settle_down()
        while len(self.ends) < len(self.scenario.steps):
            if not self.events:
                raise RuntimeError(
                    f"{self.scenario.name}: at {self.now:.0f} s work is left and nobody does it: {self._view()}"
                )
            self.now, _, happen = heapq.heappop(self.events)
            self.count += 1
            happen()
            self._settle_down()
        for cell in self.cells:
            self._book(cell)
        return Outcome(
            self.now, tuple(self.ends), self.cell_s, self.switches, self.moved, self.count, tuple(self.spans)
        )

    # ---- events -----------------------------------------------------------------------------------------------------

    def _at(self, after: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + after, next(self.order), happen))

    def _first_ends(self, cell: CellState, stamp: int) -> None:
        """The first of a cell's rollouts ends, unless its batch has changed since that was foreseen."""
        if cell.stamp != stamp:
            return
        self._advance(cell)
        left = cell.tool + cell.tokens * self.cost.token_s(len(cell.members))
        ended = (left <= 1e-9) | (cell.deadline <= self.now + 1e-9)
        for i in ended.nonzero()[0]:
            step, rollout = cell.members[i]
            whole = float(step.work.tokens.flat[rollout])
            done = 1.0 if whole == 0 else 1.0 - float(cell.tokens[i]) / whole
            step.settle(rollout, float(step.work.trained.flat[rollout]) * done)
        cell.drop(ended)
        self._foresee(cell)

    def _micro_batch_ends(self, cell: CellState, step: StepState) -> None:
        cell.busy = False
        step.computing -= 1
        self._enter(cell, "train idle")
        self._may_change(cell)

    def _changed(self, cell: CellState) -> None:
        cell.role = "train" if cell.role == "to_train" else "rollout"
        self._enter(cell, "train idle" if cell.role == "train" else "serve idle")
        self._may_change(cell)

    def _optimized(self) -> None:
        self.optimizing = False
        self.cells[0].busy = False
        self._enter(self.cells[0], "train idle")
        self.open.pop(0)
        self.ends.append(self.now)
        self._open_steps()
        self._may_change(self.cells[0])

    def _decision_time(self) -> None:
        self.decision_due = False

    # ---- what needs no time -----------------------------------------------------------------------------------------

    def _open_steps(self) -> None:
        while self.begun < len(self.scenario.steps) and len(self.open) <= self.staleness:
            self.open.append(StepState(self.begun, self.scenario.steps[self.begun], self.quorum))
            self.begun += 1

    def _settle_down(self) -> None:
        self._launch()
        if self.now >= self.next_decision:
            self.next_decision = self.now + self.decide_s
            self._decide()
            self._launch()
            self._balance()
        elif not self.decision_due:
            self.decision_due = True
            self._at(self.next_decision - self.now, self._decision_time)
        self._train()

    def _launch(self) -> None:
        """Rollouts on free slots, the emptiest cell first: those that lost their cell, then whole groups in order."""
        waiting = [s for s in self.open if s.queued]
        if not waiting and not self.homeless:
            return
        heap = [(len(c.members), c.index) for c in self.cells if c.free and len(c.members) < self.cost.slots]
        if not heap:
            return
        heapq.heapify(heap)
        fresh: dict[int, list[Arrival]] = {}
        while heap and (self.homeless or waiting):
            load, index = heapq.heappop(heap)
            if self.homeless:
                arrival = self.homeless.popleft()
            else:
                step = waiting[0]
                rollout = step.queued.popleft()
                step.live[rollout] = self.now
                work = step.work
                arrival = Arrival(step, rollout, float(work.tool_s.flat[rollout]), float(work.tokens.flat[rollout]),
                           self.now + self.scenario.time_limit_s)  # fmt: skip
                if not step.queued:
                    waiting.pop(0)
            fresh.setdefault(index, []).append(arrival)
            if load + 1 < self.cost.slots:
                heapq.heappush(heap, (load + 1, index))
        self._place(fresh)

    def _place(self, fresh: Mapping[int, list[Arrival]]) -> None:
        for index, arrivals in fresh.items():
            cell = self.cells[index]
            self._advance(cell)
            cell.members += [(a[0], a[1]) for a in arrivals]
            cell.tool = np.concatenate([cell.tool, [a[2] for a in arrivals]])
            cell.tokens = np.concatenate([cell.tokens, [a[3] for a in arrivals]])
            cell.deadline = np.concatenate([cell.deadline, [a[4] for a in arrivals]])
            self._foresee(cell)

    def _balance(self) -> None:
        """Move rollouts, the oldest first, from full cells to empty ones, as the router does call by call: a prefix in
        cache is worth a few places in the batch."""
        free = [c for c in self.cells if c.free]
        while len(free) > 1:
            full, empty = max(free, key=lambda c: len(c.members)), min(free, key=lambda c: len(c.members))
            count = (len(full.members) - len(empty.members) - AFFINITY) // 2
            if count < 1:
                return
            self._advance(full)
            oldest = np.argsort(full.deadline, kind="stable")[:count]
            self._place({empty.index: [self._leaver(full, int(i)) for i in oldest]})
            go = np.zeros(len(full.members), bool)
            go[oldest] = True
            full.drop(go)
            self._foresee(full)

    def _leaver(self, cell: CellState, i: int) -> Arrival:
        """What is left of a cell's i-th rollout when it goes elsewhere, where its context is computed again."""
        step, rollout = cell.members[i]
        prefill = float(step.work.context.flat[rollout]) / self.cost.prefill_tokens_s
        self.moved += 1
        return Arrival(step, rollout, float(cell.tool[i]) + prefill, float(cell.tokens[i]), float(cell.deadline[i]))

    def _decide(self) -> None:
        for name, decision in self.policy.decide(self._view()).items():
            cell = self.names[name]
            if decision.role != cell.told:
                cell.told = decision.role
                self.switches += 1
                self._may_change(cell)

    def _may_change(self, cell: CellState) -> None:
        if cell.busy or cell.role == cell.told or cell.role.startswith("to_"):
            return
        if cell.told == "train":
            self._advance(cell)
            self.homeless += [self._leaver(cell, i) for i in range(len(cell.members))]
            cell.drop(np.ones(len(cell.members), bool))
            cell.stamp += 1
        cell.role = "to_train" if cell.told == "train" else "to_rollout"
        self._enter(cell, "to train" if cell.told == "train" else "to rollout")
        self._at(self.cost.to_train_s if cell.told == "train" else self.cost.to_rollout_s, partial(self._changed, cell))

    def _train(self) -> None:
        if not self.open or self.optimizing:
            return
        step = self.open[0]  # a later step's gradient needs the weights that this one makes
        for index in sorted(self.idle_trainers) if step.backlog > 0 else ():
            if step.backlog <= 0:
                break
            cell = self.cells[index]
            tokens = min(step.backlog, self.cost.micro_batch_tokens)
            step.backlog = step.backlog - tokens if step.backlog > tokens else 0.0
            step.computing += 1
            cell.busy = True
            self._enter(cell, "train")
            self._at(tokens / self.cost.train_tokens_s, partial(self._micro_batch_ends, cell, step))
        central = self.cells[0]
        if step.closed and step.backlog <= 0 and not step.computing and central.role == "train" and not central.busy:
            self.optimizing = central.busy = True
            self._enter(central, "optimizer")
            self._at(self.cost.optimizer_s, self._optimized)

    # ---- the books --------------------------------------------------------------------------------------------------

    def _advance(self, cell: CellState) -> None:
        """Bring a cell's rollouts up to date: tools and tokens of each progress evenly over what is left of it."""
        passed, cell.at = self.now - cell.at, self.now
        if passed > 0 and cell.members:
            left = cell.tool + cell.tokens * self.cost.token_s(len(cell.members))
            scale = np.maximum(0.0, 1.0 - passed / np.maximum(left, 1e-300))
            cell.tool = cell.tool * scale
            cell.tokens = cell.tokens * scale

    def _foresee(self, cell: CellState) -> None:
        """Set the event of the cell's first end. The cell is up to date."""
        cell.stamp += 1
        if cell.role == "rollout":
            self._enter(cell, "serve" if cell.members else "serve idle")
        if cell.members:
            left = cell.tool + cell.tokens * self.cost.token_s(len(cell.members))
            after = float(np.minimum(left, cell.deadline - self.now).min())
            self._at(max(0.0, after), partial(self._first_ends, cell, cell.stamp))

    def _enter(self, cell: CellState, state: str) -> None:
        if state != cell.state:
            self._book(cell)
            cell.state = state
            if state == "train idle":
                self.idle_trainers.add(cell.index)
            else:
                self.idle_trainers.discard(cell.index)

    def _book(self, cell: CellState) -> None:
        self.cell_s[cell.state] += self.now - cell.since
        if self.timeline and self.now > cell.since:
            self.spans.append(Span(cell.index, cell.state, cell.since, self.now))
        cell.since = self.now

    def _tail_s(self) -> float | None:
        """By the age of the oldest live rollout of the oldest step, which is all that anybody can know."""
        if not self.open or not self.open[0].live:
            return None
        oldest = next(iter(self.open[0].live.values()))  # in order of launch
        return expected_tail_s(self.now - oldest, self.scenario.time_limit_s)

    def _view(self) -> ClusterView:
        cells = tuple(
            CellView(name, c.index == 0, c.phase, self.cost.slots, len(c.members)) for name, c in self.names.items()
        )
        head = self.open[0] if self.open else None
        return ClusterView(
            cells=cells,
            water_level=sum(len(s.queued) + len(s.live) for s in self.open),
            backlog_tokens=round(head.backlog) if head else 0,
            open_groups=sum(s.open_groups for s in self.open),
            steps_open=len(self.open),
            steps_closed=sum(s.closed for s in self.open),
            rates=self.rates,
            tail_s=self._tail_s(),
        )
