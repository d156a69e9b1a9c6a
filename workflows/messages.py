"""What travels through Temporal: plain dataclasses of ids and small facts. Rows and tensors never do.

Inputs and results of workflows, activities, signals, updates and queries. Nothing here imports more than the
standard library, so that the sandbox, the activities and the workers can all share it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gyre.config.run import RunConfig


# ---- the run ------------------------------------------------------------------------------------------------------


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


# ---- steps and groups ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingStepInput:
    """Argument of TrainingStep. `window` is its first share of the run's launch window."""

    plan: RunPlan
    index: int
    window: int
    first: bool  # no older step is open: it may finish as soon as it is closed
    paused: bool = False


@dataclass(frozen=True)
class OpenStep:
    """Argument of activity `open_step`."""

    run_id: str
    index: int


@dataclass(frozen=True)
class GroupRef:
    """A group and its members' rollout ids, by member."""

    group_id: int
    position: int
    task: str
    family: str
    rollouts: list[str]


@dataclass(frozen=True)
class OpenedStep:
    """Rows of a step, its groups and its rollouts exist."""

    step_id: int
    min_version: int
    groups: list[GroupRef]


@dataclass(frozen=True)
class HandOut:
    """Argument of activity `hand_out_group`."""

    run_id: str
    step_id: int
    group_id: int


@dataclass(frozen=True)
class HandedOut:
    """What a settled group gave: `tokens` are packed tokens of its micro-batches, 0 without a gradient."""

    outcome: str  # trained | no_variance | too_few_valid
    n_valid: int
    samples: int
    micro_batches: int
    tokens: int
    targets: int
    reward: float | None  # mean of the valid rewards


@dataclass(frozen=True)
class CloseStep:
    """Argument of activity `close_step`."""

    run_id: str
    step_id: int


@dataclass(frozen=True)
class StepDone:
    """Signal `step_done` from TrainingStep to TrainingRun. `failure` is empty unless the step failed."""

    index: int
    version: int
    reward: float | None
    failure: str = ""


# ---- rollouts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RolloutInput:
    """Argument of Rollout."""

    run_id: str
    rollout_id: str
    task: str
    family: str
    harness: str
    step: int | None  # None: evaluation
    time_limit_s: float
    score_time_limit_s: float
    score_attempts: int


@dataclass(frozen=True)
class RolloutResult:
    """How a rollout settled; a reward of None is excluded, with `exclude_reason`."""

    rollout_id: str
    outcome: str  # completed | timeout | harness_error | infrastructure | evaluator
    reward: float | None
    exclude_reason: str | None
    calls: int


@dataclass(frozen=True)
class Prepare:
    """Argument of activity `prepare`; `attempt` counts fresh harness runs of one rollout from 1."""

    run_id: str
    rollout_id: str
    attempt: int


@dataclass(frozen=True)
class Prepared:
    """The host that holds the workspace; `settled` where an earlier workflow brought the rollout to its end."""

    host: str
    settled: RolloutResult | None = None


@dataclass(frozen=True)
class RunHarness:
    """Argument of activity `run_harness`. The limit runs from the harness's start, whoever attaches to it."""

    run_id: str
    rollout_id: str
    attempt: int
    time_limit_s: float


@dataclass(frozen=True)
class HarnessEnd:
    """How a harness ended. `calls` completed model calls; `sampled` tokens of any call, complete or not."""

    outcome: str  # completed | timeout | harness_error | infrastructure
    exit_code: int | None
    calls: int
    sampled: int
    seconds: float


@dataclass(frozen=True)
class ScoreRollout:
    """Argument of activity `score`: grades the workspace, then settles the rollout with `outcome`."""

    run_id: str
    rollout_id: str
    attempt: int
    outcome: str
    score_attempts: int
    time_limit_s: float


@dataclass(frozen=True)
class Scored:
    """Result of `score`; the rollout is settled. reward is None when the evaluator failed to the end."""

    outcome: str
    reward: float | None
    exclude_reason: str | None


@dataclass(frozen=True)
class SettleRollout:
    """Argument of activity `settle`: ends a rollout without a reward."""

    run_id: str
    rollout_id: str
    outcome: str
    exclude_reason: str


@dataclass(frozen=True)
class RolloutFactsRequest:
    """Argument of activity `rollout_facts`."""

    run_id: str
    rollout_id: str


@dataclass(frozen=True)
class RolloutFacts:
    """What Postgres knows of a rollout's calls."""

    calls: int
    sampled: int


# ---- evaluation ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationInput:
    """Argument of Evaluation."""

    plan: RunPlan
    version: int


@dataclass(frozen=True)
class OpenEvaluation:
    """Argument of activity `open_evaluation`."""

    run_id: str
    version: int


@dataclass(frozen=True)
class OpenedEvaluation:
    """Rows of an evaluation, its groups and rollouts exist."""

    evaluation_id: int
    groups: list[GroupRef]


@dataclass(frozen=True)
class FinishEvaluation:
    """Argument of activity `finish_evaluation`."""

    run_id: str
    evaluation_id: int


@dataclass(frozen=True)
class EvaluationResult:
    """Held-out result: success is the share of valid rollouts with reward >= 1."""

    version: int
    success: float | None
    mean_reward: float | None
    n_valid: int


# ---- scheduler and cells ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Observation:
    """Signal `observe` to ElasticScheduler: the whole present state of one source, so that a lost one does no harm."""

    source: str  # "step-3" | "eval-v0"
    order: int  # older sources get the launch window first
    queued: int  # rollouts not launched yet
    running: int  # rollouts launched and not settled
    open_groups: int  # groups not handed out
    ready_tokens: int  # tokens handed out for training so far
    window: int  # rollouts that the source may have running
    closed: bool = False  # every group is handed out, the optimizer step is due
    done: bool = False  # the source is over


@dataclass(frozen=True)
class SchedulerInput:
    """Argument of ElasticScheduler; the rest is set by continue-as-new alone."""

    plan: RunPlan
    sources: list[Observation] = field(default_factory=list)
    roles: dict[str, str] = field(default_factory=dict)  # phase of each cell, as it last said
    told: dict[str, str] = field(default_factory=dict)  # role that each cell was last told
    switches: int = 0


@dataclass(frozen=True)
class SchedulerView:
    """Answer of ElasticScheduler's query `view`."""

    water_level: int
    backlog_tokens: int
    roles: dict[str, str]
    switches: int


@dataclass(frozen=True)
class BacklogRequest:
    """Argument of local activity `read_backlog`."""

    run_id: str


@dataclass(frozen=True)
class Backlog:
    """Tokens in micro-batches whose gradient no trainer holds yet."""

    tokens: int


@dataclass(frozen=True)
class SetRole:
    """Signal `set_role` to Cell."""

    role: str  # rollout | train
    reason: str


@dataclass(frozen=True)
class CellChanged:
    """Signal `cell_changed` from Cell to ElasticScheduler."""

    cell: str
    role: str  # rollout | to_train | train | to_rollout


@dataclass(frozen=True)
class CellInput:
    """Argument of Cell; the rest is set by continue-as-new alone."""

    plan: RunPlan
    cell: str
    role: str = "rollout"
    want: str = "rollout"
    reason: str = ""
    version: int = 0  # newest published version that the cell was told of
    loaded: int = 0  # version that it serves
    changes: int = 0


@dataclass(frozen=True)
class CellSwitch:
    """Argument of activities `cell_to_train` and `cell_to_rollout`."""

    run_id: str
    cell: str
    reason: str


@dataclass(frozen=True)
class CellSwitched:
    """Result of both: the role reached, the version loaded or served, and seconds of each phase."""

    role: str
    version: int
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CellTrain:
    """Argument of activity `cell_train`."""

    run_id: str
    cell: str


@dataclass(frozen=True)
class CellTrained:
    """Result of `cell_train`, which ends by cancellation: what it computed."""

    micro_batches: int
    tokens: int


@dataclass(frozen=True)
class CellWeights:
    """Argument of activity `cell_load_weights`: a serving cell takes `version` or a newer one."""

    run_id: str
    cell: str
    version: int


@dataclass(frozen=True)
class CellServing:
    """Result of `cell_load_weights`: the version served now."""

    version: int


@dataclass(frozen=True)
class FinishStep:
    """Argument of activity `finish_step`, on central's queue."""

    run_id: str
    step_id: int


@dataclass(frozen=True)
class FinishedStep:
    """Result of `finish_step`: the version made and published, and a few figures of the optimizer step."""

    version: int
    metrics: dict[str, float] = field(default_factory=dict)
