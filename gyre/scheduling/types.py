"""What a scheduling policy sees, and what it answers. Pure data: the workflows and the simulator share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Role = Literal["rollout", "train"]
Phase = Literal["rollout", "to_train", "train", "to_rollout"]


@dataclass(frozen=True)
class CellView:
    """A cell. `max_running` is the number of rollouts that it can serve at once, `live` those that it holds now (0
    where nobody counts), `kv_tokens` the tokens of context that its cache holds (None: as many as may come); `role`
    may be on the way. A cell that should serve and cannot, since its engine is down, has no room: 0 of both."""

    name: str
    central: bool
    role: Phase
    max_running: int
    live: int = 0
    kv_tokens: int | None = None

    @property
    def heading(self) -> Role:
        """The role that it has or is on its way to."""
        return "rollout" if self.role in ("rollout", "to_rollout") else "train"


@dataclass(frozen=True)
class Rates:
    """What was measured: tokens a second that one cell trains, and the seconds of a change of role each way."""

    train_tokens_s: float
    to_train_s: float
    to_rollout_s: float


@dataclass(frozen=True)
class Pace:
    """What the newest steps took: `step_s`, seconds from the end of one to the end of the next, and `longest_s`, the
    seconds that the longest of their rollouts ran."""

    step_s: float
    longest_s: float


@dataclass(frozen=True)
class ClusterView:
    """The run at one moment, over all open steps and evaluations.

    `water_level`: rollouts that wait for their launch or run. `backlog_tokens`: tokens of the oldest open step that
    are handed out and whose gradient no trainer holds yet. `open_groups`: groups of training steps that are not handed
    out. `steps_open`: steps whose optimizer step is not done; `steps_closed`: those of them with every group handed
    out. `rates`: None until they have been measured. `tail_s`: seconds that the rollouts of the oldest open step are
    expected to run on (see `expected_tail_s`); None where nobody knows. `context_tokens`: tokens of the contexts of
    all live rollouts, which the cells that serve should hold in their caches. `pace`: None until two steps have ended.
    """

    cells: tuple[CellView, ...]
    water_level: int
    backlog_tokens: int
    open_groups: int
    steps_open: int
    steps_closed: int
    rates: Rates | None = None
    tail_s: float | None = None
    context_tokens: int = 0
    pace: Pace | None = None

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


def expected_tail_s(oldest_age_s: float, time_limit_s: float) -> float:
    """Seconds that the oldest live rollout is expected to run on, from its age alone.

    Durations of agents' rollouts are long-tailed: the longer one has run, the longer it will (for a Pareto tail of
    index 3 the mean residual life is half the age). The time limit cuts that off.
    """
    return max(0.0, min(oldest_age_s / 2, time_limit_s - oldest_age_s))
