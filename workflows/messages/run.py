"""The run: its plan, its state, what may be asked of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gyre.config.run import RunConfig


@dataclass(frozen=True)
class PlanCell:
    """A cell as the workflows see it; `max_running` is its serving capacity in requests."""

    name: str
    central: bool
    max_running: int


@dataclass(frozen=True)
class RunPlan:
    """The facts of a run file that workflows need. Times in seconds."""

    run_id: str
    steps: int
    cells: list[PlanCell]
    harness: str
    groups_per_step: int
    group_size: int
    max_concurrent: int
    max_staleness: int
    time_limit_s: float
    score_time_limit_s: float
    score_attempts: int
    policy: str  # elastic | colocate | async
    train_cells: list[str]
    min_backlog_tokens: int
    heldout: bool
    evaluate_every: int
    quorum: int | None = None  # rewards at which a group is handed out though members run; None: never
    over_submit: int = 0  # rollouts of a group beyond group_size
    rollouts_per_slot: float = 1.0  # live rollouts that each place in a cell's batch serves

    @property
    def central(self) -> str:
        return next(c.name for c in self.cells if c.central)


def plan_of(config: RunConfig) -> RunPlan:
    """The plan of a run file: what `gyre train` starts TrainingRun with."""
    r, s = config.rollouts, config.scheduling
    return RunPlan(
        run_id=config.run_id,
        steps=config.steps,
        cells=[PlanCell(c.name, c.central, config.serving.max_running) for c in config.cells],
        harness=config.harness.name,
        groups_per_step=r.groups_per_step,
        group_size=r.group_size,
        max_concurrent=r.max_concurrent,
        max_staleness=r.max_staleness,
        time_limit_s=r.time_limit_s,
        score_time_limit_s=r.score_time_limit_s,
        score_attempts=r.score_attempts,
        policy=s.policy,
        train_cells=list(s.train_cells),
        min_backlog_tokens=s.min_backlog_tokens,
        heldout=config.tasks.heldout is not None,
        evaluate_every=config.evaluation.every,
        quorum=r.handed_out_at,
        over_submit=r.over_submit,
        rollouts_per_slot=s.rollouts_per_slot,
    )


@dataclass
class RunState:
    """What a TrainingRun carries over continue-as-new."""

    next_step: int = 0  # index of the next step to open
    open_steps: list[int] = field(default_factory=list)
    turn: int = -1  # the open step that may take its optimizer step: the oldest one
    steps_done: int = 0
    version: int = 0  # newest policy version
    evaluated: list[int] = field(default_factory=list)  # versions
    reward: float | None = None  # mean reward of the newest finished step
    paused: bool = False
    stopping: str = ""  # "" | "wait" (open steps end normally) | "now"
    failure: str = ""


@dataclass(frozen=True)
class TrainingRunInput:
    """Argument of TrainingRun; `state` is set by continue-as-new alone."""

    plan: RunPlan
    state: RunState | None = None


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    run_id: str
    state: str  # done | stopped | failed
    steps_done: int
    version: int


@dataclass(frozen=True)
class RunStatus:
    """Answer of TrainingRun's query `status`."""

    run_id: str
    state: str  # evaluating | running | paused | stopping | done | stopped | failed
    steps: int
    steps_done: int
    open_steps: list[int]
    version: int
    evaluated: list[int]
    reward: float | None


@dataclass(frozen=True)
class StopRun:
    """Argument of the update `stop`: `wait` lets open steps end normally; otherwise their rollouts are cancelled."""

    wait: bool = False


@dataclass(frozen=True)
class OpenRun:
    """Argument of activity `open_run`."""

    run_id: str


@dataclass(frozen=True)
class OpenedRun:
    """The run's row exists and its task folders are sound; the rest is where an earlier workflow of it came to."""

    tasks: int
    heldout: int
    steps_done: int = 0
    version: int = 0
    evaluated: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class EndRun:
    """Argument of activity `end_run`."""

    run_id: str
    state: str  # done | stopped | failed


@dataclass(frozen=True)
class MarkRun:
    """Argument of activity `mark_run`: running | paused."""

    run_id: str
    state: str
