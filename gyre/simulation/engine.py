"""The events: rollouts end, micro-batches end, cells change role, optimizer steps end. Exact between decisions.

The rollouts of one cell share its decode batch, so each arrival and each end changes the speed of the others; a cell's
rollouts are therefore brought up to date whenever its batch changes, and only then.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from gyre.scheduling import ClusterView, Demand, Policy, Rates, StepEnd, expected_tail_s, pace_of, share_window
from gyre.simulation.model import Scenario
from gyre.simulation.outcome import STATES, Outcome, Span
from gyre.simulation.state import DEADLINE, Arrival, CellState, StepState
from gyre.simulation.surplus import Surplus

# Rollouts by which a cell may be fuller than another before one moves (as gyre.gateway.routing has it).
AFFINITY = 4


def simulate(
    scenario: Scenario,
    policy: Policy,
    *,
    staleness: int = 0,
    quorum: int | None = None,
    decide_s: float = 1.0,
    timeline: bool = False,
    rates_known: bool = True,
) -> Outcome:
    """Run `scenario` under `policy` with at most `staleness + 1` steps open.

    `quorum`: settled members from which a group trains (None: all of them). `decide_s`: the policy is asked at most
    once in so many seconds. `rates_known`: False where the policy learns its rates as a real run does, from the first
    micro-batch and the first change of role. Raises RuntimeError where work is left that nothing will ever do: a fault
    of the policy.
    """
    if staleness < 0 or (quorum is not None and quorum < 1) or decide_s < 0:
        raise ValueError("staleness and decide_s must not be negative, a quorum at least 1")
    run = _Run(scenario, policy, staleness, quorum, decide_s, timeline, rates_known)
    with _uncollected():
        return run.run()


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the cyclic collector: a run makes no cycles, and looking for them takes a twelfth of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Run:
    def __init__(
        self, scenario: Scenario, policy: Policy, staleness: int, quorum: int | None, decide_s: float, timeline: bool,
        rates_known: bool,
    ) -> None:  # fmt: skip
        self.scenario, self.cost, self.policy = scenario, scenario.cost, policy
        self.staleness, self.quorum, self.decide_s, self.timeline = staleness, quorum, decide_s, timeline
        self.now = 0.0
        self.cells = [CellState(i) for i in range(scenario.cells)]
        self.names = {f"c{i}": cell for i, cell in enumerate(self.cells)}
        self.room = set(range(scenario.cells))
        """Cells that may take a rollout."""
        self.touched: set[int] = set()
        self.views = [cell.view(name, scenario.cost.slots) for name, cell in self.names.items()]
        """The cells as the policy saw them last; those of `unseen` have changed since."""
        self.unseen: set[int] = set()
        self.open: list[StepState] = []
        self.begun = 0
        self.events: list[tuple[float, int, Callable[[], bool | None]]] = []
        """When, in which order, and what happens; that returns True where nothing has happened after all."""
        self.order = itertools.count()
        self.begins: list[float] = []
        self.settled: list[float] = []
        self.ends: list[float] = []
        self.step_ends: list[StepEnd] = []
        self.homeless: deque[Arrival] = deque()
        self.surplus = Surplus(self.homeless)
        self.idle_trainers: set[int] = set()
        self.optimizing = False
        self.next_decision = 0.0
        self.decision_due = False
        self.cell_s = dict.fromkeys(STATES, 0.0)
        self.spans: list[Span] = []
        self.switches = self.moved = self.count = 0
        self.trained = 0.0
        c = self.cost
        self.rates = Rates(c.train_tokens_s, c.to_train_s, c.to_rollout_s)
        self.has_trained = self.has_changed = rates_known

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
            if happen() and self.decision_due and self.now < self.next_decision:
                continue
            self._settle_down()
        for cell in self.cells:
            self._book(cell)
        return Outcome(
            self.now, tuple(self.begins), tuple(self.settled), tuple(self.ends), self.cell_s, self.switches, self.moved,
            self.count, self.trained, self.surplus.sampled, self.surplus.tokens, tuple(self.spans),
        )  # fmt: skip

    # ---- events -----------------------------------------------------------------------------------------------------

    def _at(self, after: float, happen: Callable[[], bool | None]) -> None:
        heapq.heappush(self.events, (self.now + after, next(self.order), happen))

    def _first_ends(self, cell: CellState, stamp: int) -> bool:
        """The first of a cell's rollouts ends, unless (True) its batch has changed since that was foreseen."""
        if cell.stamp != stamp:
            return True
        cell.advance(self.now)
        ended = cell.ended(self.now)
        left = [(*cell.members[i], cell.sampled(i)) for i in ended.nonzero()[0].tolist()]
        cell.drop(ended)
        self._touch(cell)
        for step, rollout, sampled in left:
            self.surplus.left(step, rollout, sampled)
        for step, rollout, sampled in left:
            trained = step.trained[rollout] * sampled
            after = 0.0 if step.work.after_s is None else float(step.work.after_s.flat[rollout])
            if after > 0:
                self._at(after, partial(self._settled, step, rollout, trained))
            else:
                self._settled(step, rollout, trained)
        return False

    def _settled(self, step: StepState, rollout: int, trained: float) -> None:
        if rollout not in step.live:
            return  # it was ended meanwhile
        tokens, group = step.settle(rollout, trained, self.now), rollout // step.size
        if tokens is not None:
            last = step.complete(group)
            if last:
                for cell in self.surplus.end(step, group, self.now):
                    self._touch(cell)
            hand_out = partial(step.hand_out, tokens, self.cost.micro_batch_tokens, last)
            if self.cost.handout_s > 0:
                self._at(self.cost.handout_s, hand_out)
            else:
                hand_out()

    def _micro_batch_ends(self, cell: CellState, step: StepState, tokens: float) -> None:
        cell.busy = False
        self.trained += tokens
        self.has_trained = True
        step.computing -= 1
        self._enter(cell, "train idle")
        self._may_change(cell)

    def _changed(self, cell: CellState) -> None:
        cell.role = "train" if cell.role == "to_train" else "rollout"
        self.has_changed = True
        self._enter(cell, "train idle" if cell.role == "train" else "serve idle")
        self._may_change(cell)
        self._note_room(cell)

    def _optimized(self) -> None:
        self.optimizing = False
        self.cells[0].busy = False
        self._enter(self.cells[0], "train idle")
        step = self.open.pop(0)
        self.settled.append(step.settled_at)
        self.ends.append(self.now)
        self.step_ends.append(StepEnd(self.now, step.longest_s))
        if self.cost.open_s > 0:
            self._at(self.cost.open_s, self._open_steps)
        else:
            self._open_steps()
        self._may_change(self.cells[0])

    def _decision_time(self) -> None:
        self.decision_due = False

    # ---- what needs no time -----------------------------------------------------------------------------------------

    def _open_steps(self) -> None:
        steps, drained = self.scenario.steps, self.scenario.drained
        while self.begun < len(steps) and len(self.open) <= self.staleness:
            if self.begun in drained and self.open:
                return
            self.open.append(StepState(self.begun, steps[self.begun], self.quorum, self.scenario.over_submit))
            self.begins.append(self.now)
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
        for index in sorted(self.touched):
            self._foresee(self.cells[index])
        self.touched.clear()

    def _launch(self) -> None:
        """Rollouts to cells, the emptiest first: those that lost their cell, then whole groups in order."""
        waiting = [s for s in self.open if s.queued]
        if self.scenario.window is not None:
            self._launch_in_window(waiting)
            waiting = []
        if not self.room or not (waiting or self.homeless):
            return
        heap = [(len(self.cells[i].members), i) for i in self.room]
        heapq.heapify(heap)
        most = self.cost.slots if self.scenario.window is None else len(self.homeless) + heap[-1][0] + self.cost.slots
        fresh: dict[int, list[Arrival]] = {}
        while heap and (self.homeless or waiting):
            load, index = heapq.heappop(heap)
            if self.homeless:
                arrival = self.homeless.popleft()
            else:
                step = waiting[0]
                arrival = self._start(step)
                if not step.queued:
                    waiting.pop(0)
            fresh.setdefault(index, []).append(arrival)
            if load + 1 < most:
                heapq.heappush(heap, (load + 1, index))
        for index, arrivals in fresh.items():
            self._place(self.cells[index], arrivals)

    def _launch_in_window(self, waiting: list[StepState]) -> None:
        """Launch what the window allows, the oldest step first. A rollout looks for a cell when it needs one."""
        if not waiting:
            return
        assert self.scenario.window is not None
        demands = [Demand(str(s.index), s.index, len(s.queued), len(s.live)) for s in self.open]
        shares = share_window(self.scenario.window, demands)
        for step in waiting:
            while step.queued and len(step.live) < shares[str(step.index)]:
                rollout = step.queued[0]
                arrival = self._start(step)
                before = 0.0 if step.work.before_s is None else float(step.work.before_s.flat[rollout])
                if before > 0:
                    late = arrival._replace(deadline=arrival.deadline + before)
                    self._at(before, partial(self._needs_cell, late))
                else:
                    self.homeless.append(arrival)

    def _start(self, step: StepState) -> Arrival:
        rollout = step.queued.popleft()
        step.live[rollout] = self.now
        work, limit = step.work, self.scenario.time_limit_s
        return Arrival(
            step, rollout, float(work.tool_s.flat[rollout]), float(work.tokens.flat[rollout]), self.now + limit
        )

    def _needs_cell(self, arrival: Arrival) -> None:
        if arrival.rollout in arrival.step.live:
            self.homeless.append(arrival)

    def _place(self, cell: CellState, arrivals: list[Arrival]) -> None:
        cell.advance(self.now)
        cell.join(arrivals)
        for arrival in arrivals:
            arrival.step.cell_of[arrival.rollout] = cell
        self._touch(cell)

    def _balance(self) -> None:
        """Move rollouts, the oldest first, from full cells to empty ones, as the router does call by call: a prefix in
        cache is worth a few places in the batch."""
        free = [c for c in self.cells if c.free]
        loads = [len(c.members) for c in free]
        while len(free) > 1 and max(loads) - min(loads) >= AFFINITY + 2:
            most, least = loads.index(max(loads)), loads.index(min(loads))
            full, empty, count = free[most], free[least], (loads[most] - loads[least] - AFFINITY) // 2
            loads[most], loads[least] = loads[most] - count, loads[least] + count
            full.advance(self.now)
            oldest = np.argsort(full.work[DEADLINE], kind="stable")[:count]
            self._place(empty, [self._leaver(full, int(i)) for i in oldest])
            go = np.zeros(len(full.members), bool)
            go[oldest] = True
            full.drop(go)
            self._touch(full)

    def _leaver(self, cell: CellState, i: int) -> Arrival:
        self.moved += 1
        return cell.leaver(i, self.cost.prefill_tokens_s)

    def _decide(self) -> None:
        for name, decision in self.policy.decide(self._view()).items():
            cell = self.names[name]
            if decision.role != cell.told:
                cell.told = decision.role
                self.switches += 1
                self._may_change(cell)
                self._note_room(cell)

    def _may_change(self, cell: CellState) -> None:
        if cell.busy or cell.role == cell.told or cell.role.startswith("to_"):
            return
        if cell.told == "train":
            cell.advance(self.now)
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
        for index in sorted(self.idle_trainers) if step.queue else ():
            if not step.queue:
                break
            cell = self.cells[index]
            tokens = step.queue.popleft()
            step.backlog = step.backlog - tokens if step.queue else 0.0
            step.computing += 1
            cell.busy = True
            self._enter(cell, "train")
            took = self.cost.micro_batch_s + tokens / self.cost.train_tokens_s
            self._at(took, partial(self._micro_batch_ends, cell, step, tokens))
        central = self.cells[0]
        if step.closed and not step.queue and not step.computing and central.role == "train" and not central.busy:
            self.optimizing = central.busy = True
            self._enter(central, "optimizer")
            self._at(self.cost.optimizer_s, self._optimized)

    # ---- the books --------------------------------------------------------------------------------------------------

    def _touch(self, cell: CellState) -> None:
        """Its batch has changed. Its speed follows when all that happens now has happened."""
        cell.stamp += 1
        self.touched.add(cell.index)
        self._note_room(cell)

    def _foresee(self, cell: CellState) -> None:
        """Set the event of the cell's first end."""
        if cell.role == "rollout":
            self._enter(cell, "serve" if cell.members else "serve idle")
        if cell.members:
            cell.set_speed(self.cost)
            self._at(cell.ends_after(self.now), partial(self._first_ends, cell, cell.stamp))

    def _note_room(self, cell: CellState) -> None:
        """Its role or its number of rollouts has changed."""
        self.unseen.add(cell.index)
        if cell.free and (self.scenario.window is not None or len(cell.members) < self.cost.slots):
            self.room.add(cell.index)
        else:
            self.room.discard(cell.index)

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
        for index in self.unseen:
            self.views[index] = self.cells[index].view(f"c{index}", self.cost.slots)
        self.unseen.clear()
        head = self.open[0] if self.open else None
        return ClusterView(
            cells=tuple(self.views),
            water_level=sum(len(s.queued) + len(s.live) for s in self.open),
            backlog_tokens=round(head.backlog) if head else 0,
            open_groups=sum(s.open_groups for s in self.open),
            steps_open=len(self.open),
            steps_closed=sum(s.closed for s in self.open),
            rates=self.rates if self.has_trained and self.has_changed else None,
            tail_s=self._tail_s(),
            pace=pace_of(self.step_ends),
        )
