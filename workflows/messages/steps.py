"""Steps, groups, and evaluations, which are groups too."""

from __future__ import annotations

from dataclasses import dataclass

from workflows.messages.run import RunPlan


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
    """What a group has given so far: `tokens` are packed tokens of its micro-batches, 0 without a gradient.

    `closed`: all members are settled, and nothing more will come of it.
    """

    outcome: str  # trained | no_variance | low_variance | too_few_valid, or open: its rewards do not differ yet
    n_valid: int
    samples: int
    micro_batches: int
    tokens: int
    targets: int
    reward: float | None  # mean of the valid rewards
    closed: bool = True


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
