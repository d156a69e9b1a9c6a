"""One rollout, from workspace to reward."""

from __future__ import annotations

from dataclasses import dataclass


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
    outcome: str  # completed | timeout | harness_error | infrastructure | evaluator | surplus
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
