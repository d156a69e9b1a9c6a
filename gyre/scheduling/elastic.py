"""The elastic policy: cells move to training as the water level falls, and back as it rises."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gyre.scheduling.types import CellView, ClusterView, Decision, Role

_AS_IT_IS: dict[Role, Decision] = {"rollout": Decision("rollout", "as it is"), "train": Decision("train", "as it is")}


@dataclass(frozen=True)
class ElasticPolicy:
    """Serving comes first; what serving does not need may train.

    With S the cells that serve, c(S) the rollouts they can hold, w the water level and B the backlog:

    - **Room.** A cell leaves S only if c(S without it) >= w, the caches of S without it hold an eighth more than the
      contexts of all live rollouts, and some cell stays while w > 0. The central cell leaves first (only it can take
      the optimizer step), then the cells that hold the fewest rollouts.
    - **Need.** Trainers are wanted for the backlog to be gone when the tail ends, and no more: what is left serves,
      since an emptier cell decodes its stragglers faster. With r the tokens a second of one trainer, R the expected
      tail and s = to_train + to_rollout the price of a change, that is `ceil(B / (r * max(R, s)))`; when a step is
      closed (nobody is left to wait for), as many as there are.
    - **Earning.** A trainer must find at least as much work as its change costs, so never more than `B / (r * s)`. The
      central cell has to change for the optimizer step in any case: it may go as soon as `B >= r * to_train`.
    - **Return.** Satellites come back when w exceeds c(S), when the live contexts exceed the caches of S by an
      eighth (there a little too much costs a prefill, not a place), or when the backlog is gone and the tail is
      expected to last longer than the price of two changes; the central one only under the first two rules, and only
      if it has nothing to do or nobody serves. All come back when no step is open.
    - **Staying.** Rollouts that wait for their launch (the next step's) do not call trainers back from a backlog that
      cannot wait for them. What can: rollouts that are launched now run for up to L seconds, the longest of the newest
      steps, and all n cells do a step's work in D, so until then they have n * (L - D) seconds to spare. Of more than
      that, up to half of the cells stay, as long as c(S) holds who is live, and no more than earn their change.

    The level falls until a step opens, so a cell that left under the first rule is not called back by it before. Until
    rates have been measured, one trainer is wanted for every `min_backlog_tokens`.
    """

    min_backlog_tokens: int = 2048
    kv_hysteresis: float = 0.125

    def decide(self, view: ClusterView) -> Mapping[str, Decision]:
        decisions = {c.name: _AS_IT_IS[c.heading] for c in view.cells}
        if view.steps_open == 0:
            return {c.name: Decision("rollout", "nothing to train") for c in view.cells}
        heading_serve = [c for c in view.cells if c.heading == "rollout"]
        capacity = sum(c.max_running for c in heading_serve)
        too_long = view.context_tokens > (1 + self.kv_hysteresis) * _kv(heading_serve)
        if view.water_level > 0 and (not heading_serve or view.water_level > capacity or too_long):
            return decisions | self._come_back(view, capacity, _kv(heading_serve), capacity > 0)
        return decisions | (self._leave(view) or self._spread(view))

    def wanted(self, view: ClusterView) -> int:
        """Trainers for the backlog."""
        rates, backlog = view.rates, view.backlog_tokens
        if rates is None:
            return backlog // max(1, self.min_backlog_tokens)
        if backlog == 0:
            return 0
        price = rates.to_train_s + rates.to_rollout_s
        work = backlog / rates.train_tokens_s  # seconds of one trainer
        if view.water_level == 0:  # nobody is served less for it, and the way back has to be gone anyway
            return max(1, int(work / max(rates.to_train_s, 1e-9)))
        most = int(work / max(price, 1e-9))
        if work >= rates.to_train_s:
            most = max(1, most)  # the central cell's, which goes first and would have to go anyway
        if view.steps_closed > 0 or view.tail_s is None:
            return most
        return min(most, math.ceil(work / max(view.tail_s, price, 1e-9)))

    def _come_back(self, view: ClusterView, capacity: int, kv: float, served: bool) -> dict[str, Decision]:
        back: dict[str, Decision] = {}
        trainers = sum(c.heading == "train" for c in view.cells)
        stay = self._staying(view, capacity, kv)
        has_work = view.steps_closed > 0 or view.backlog_tokens > 0
        for cell in sorted((c for c in view.cells if c.heading == "train"), key=_leaving_order, reverse=True):
            enough = capacity >= view.water_level and (1 + self.kv_hysteresis) * kv >= view.context_tokens
            if served and (enough or trainers <= stay or (cell.central and has_work)):
                continue
            why = f"water level {view.water_level} exceeds capacity {capacity}"
            if capacity >= view.water_level and served:
                why = f"contexts of {view.context_tokens} tokens exceed caches of {kv:.0f}"
            back[cell.name] = Decision("rollout", why)
            capacity, kv, served = capacity + cell.max_running, kv + _kv((cell,)), True
            trainers -= 1
        return back

    def _staying(self, view: ClusterView, capacity: int, kv: float) -> int:
        """Trainers that rollouts which only wait for their launch do not call back."""
        rates, pace, live = view.rates, view.pace, sum(c.live for c in view.cells)
        if rates is None or pace is None or live > capacity or view.context_tokens > kv:
            return 0
        work = view.backlog_tokens / rates.train_tokens_s
        if work <= len(view.cells) * max(0.0, pace.longest_s - pace.step_s):
            return 0
        price = rates.to_train_s + rates.to_rollout_s
        return min(len(view.cells) // 2, int(work / max(price, 1e-9)))

    def _leave(self, view: ClusterView) -> dict[str, Decision]:
        leave: dict[str, Decision] = {}
        missing = self.wanted(view) - sum(c.heading == "train" for c in view.cells)
        if missing <= 0 and view.steps_closed == 0:
            return leave
        servers = sum(c.role == "rollout" for c in view.cells)
        capacity = sum(c.max_running for c in view.cells if c.role == "rollout")
        for cell in sorted((c for c in view.cells if c.heading == "rollout"), key=_leaving_order):
            takes_optimizer_step = cell.central and view.steps_closed > 0
            if missing <= 0 and not takes_optimizer_step:
                continue
            serves = cell.role == "rollout"  # one that is still on its way back holds nothing yet
            stays, remaining = servers - serves, capacity - cell.max_running * serves
            kv_stays = _kv(c for c in view.cells if c.role == "rollout" and c.name not in leave and c is not cell)
            holds = remaining >= view.water_level and kv_stays >= view.context_tokens * (1 + self.kv_hysteresis)
            if view.water_level > 0 and (not holds or stays < 1):
                break
            why = f"{view.backlog_tokens} tokens to train" + (", step closed" if view.steps_closed else "")
            leave[cell.name] = Decision("train", f"{why}; {remaining} slots hold water level {view.water_level}")
            servers, capacity, missing = stays, remaining, missing - 1
        return leave

    def _spread(self, view: ClusterView) -> dict[str, Decision]:
        """Idle satellites come back to the stragglers, where the tail is long enough to pay for it."""
        if view.rates is None or view.tail_s is None or view.water_level == 0:
            return {}
        if view.backlog_tokens > 0 or view.tail_s < 2 * (view.rates.to_train_s + view.rates.to_rollout_s):
            return {}
        why = f"nothing to train; {view.water_level} rollouts are expected to last {view.tail_s:.0f} s"
        return {c.name: Decision("rollout", why) for c in view.cells if c.heading == "train" and not c.central}


def _kv(cells: Iterable[CellView]) -> float:
    """Tokens of context that the cells' caches hold together."""
    return sum(math.inf if c.kv_tokens is None else c.kv_tokens for c in cells)


def _leaving_order(cell: CellView) -> tuple[bool, int, int, str]:
    return (not cell.central, cell.live, cell.max_running, cell.name)
