"""The scheduler and the cells."""

from __future__ import annotations

from dataclasses import dataclass, field

from gyre.scheduling import StepEnd
from workflows.messages.run import RunPlan


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
class ClusterRequest:
    """Argument of local activity `read_cluster`."""

    run_id: str


@dataclass(frozen=True)
class CellFacts:
    """What was measured of a cell; see `gyre.store.queries.cluster`."""

    name: str
    serves: bool  # it can take calls now
    rollouts: int  # live rollouts whose prefixes lie in its cache
    context_tokens: int  # of those
    kv_tokens: int | None  # that its cache holds


@dataclass(frozen=True)
class ClusterFacts:
    """Result of `read_cluster`: what was measured of the run. Rates are of one cell; None before the first."""

    backlog_tokens: int = 0  # in micro-batches whose gradient no trainer holds yet
    train_tokens_s: float | None = None
    to_train_s: float | None = None
    to_rollout_s: float | None = None
    oldest_age_s: float | None = None  # of the oldest live rollout of the oldest open step
    context_tokens: int = 0  # of all live rollouts
    cells: list[CellFacts] = field(default_factory=list)
    live_rollouts: int | None = None  # whose harness has yet to start or to end
    running_rollouts: int = 0  # whose harness runs; some of them no cell has answered yet


@dataclass(frozen=True)
class SchedulerInput:
    """Argument of ElasticScheduler; the rest is set by continue-as-new alone."""

    plan: RunPlan
    sources: list[Observation] = field(default_factory=list)
    roles: dict[str, str] = field(default_factory=dict)  # phase of each cell, as it last said
    told: dict[str, str] = field(default_factory=dict)  # role that each cell was last told
    reasons: dict[str, str] = field(default_factory=dict)  # why it was told that
    facts: ClusterFacts = field(default_factory=ClusterFacts)
    switches: int = 0
    ends: list[StepEnd] = field(default_factory=list)  # of the newest steps that have ended
    longest_s: float = 0.0  # greatest age that a rollout of the oldest open step was seen at


@dataclass(frozen=True)
class SchedulerView:
    """Answer of ElasticScheduler's query `view`: what it decides by, and what it decided."""

    water_level: int
    roles: dict[str, str]
    reasons: dict[str, str]
    switches: int
    tail_s: float | None  # that the oldest rollouts are expected to run on
    facts: ClusterFacts


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
    role: str = "unknown"
    want: str = "rollout"
    reason: str = ""
    version: int = 0  # newest published version that the cell was told of
    loaded: int = 0  # version that it serves
    changes: int = 0
    phases: dict[str, float] = field(default_factory=dict)  # seconds, of its last change of role
    since: float = 0.0  # when it took its role, Unix time


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
