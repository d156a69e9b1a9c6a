"""The tables of Gyre. Token ids are little-endian int32, log-probs little-endian float32, both in `bytea`.

A row is written by one part only (named in each class), so that no two processes fight over a column. What must never
be written at all (a reward that is not a number, a settled rollout with neither reward nor reason) is a CHECK.
"""

from __future__ import annotations

import datetime as dt
from typing import Any, ClassVar

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


def _one_of(column: str, *values: str) -> CheckConstraint:
    return CheckConstraint(f"{column} IN ({', '.join(repr(v) for v in values)})", name=f"{column}_known")


def _finite(column: str) -> CheckConstraint:
    return CheckConstraint(f"{column} > '-Infinity' AND {column} < 'Infinity'", name=f"{column}_finite")


BRANCH_KINDS = ("main", "main-summary", "sub-agent", "sub-agent-summary", "auxiliary")


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar = {
        str: Text,
        dt.datetime: DateTime(timezone=True),
        # Without none_as_null, None would be stored as JSON's null, which no IS NULL finds.
        dict[str, Any]: JSONB(none_as_null=True),
        list[Any]: JSONB(none_as_null=True),
        bytes: LargeBinary,
        list[str]: ARRAY(Text),
        list[int]: ARRAY(BigInteger),
    }


class Run(Base):
    """One training run. Written by TrainingRun's activities."""

    __tablename__ = "runs"
    __table_args__ = (_one_of("state", "running", "paused", "done", "stopped", "failed", "archived"),)
    id: Mapped[str] = mapped_column(primary_key=True)
    config: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(server_default="running")  # as above; archived: imported
    workflow_id: Mapped[str]
    vocabulary: Mapped[str | None]  # of its policy, in token_pieces; NULL: token ids cannot be read as text in SQL
    started_at: Mapped[dt.datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[dt.datetime | None]


class TokenPiece(Base):
    """The bytes of one token, so that SQL can read ids as text. Written when a run starts, once a tokenizer."""

    __tablename__ = "token_pieces"
    vocabulary: Mapped[str] = mapped_column(primary_key=True)  # SHA-256 of tokenizer.json, see gyre.store.vocabulary
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    piece: Mapped[bytes]


class Step(Base):
    """One optimizer step. Written by TrainingStep's activities and, when it ends, by the central trainer."""

    __tablename__ = "steps"
    __table_args__ = (UniqueConstraint("run_id", "index"), _one_of("state", "open", "closed", "done"))
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    index: Mapped[int]  # 0-based; the optimizer step makes policy version index + 1
    state: Mapped[str] = mapped_column(server_default="open")  # open | closed (all groups handed out) | done
    min_version: Mapped[int]  # oldest policy version that may sample for it
    started_at: Mapped[dt.datetime] = mapped_column(server_default=func.now())
    rollouts_done_at: Mapped[dt.datetime | None]
    trained_at: Mapped[dt.datetime | None]  # optimizer step done
    published_at: Mapped[dt.datetime | None]
    n_valid: Mapped[int | None]  # R: what a loss averaged over rollouts is divided by; see close_step
    metrics: Mapped[dict[str, Any]] = mapped_column(server_default="{}")  # see gyre.training.metrics


class Evaluation(Base):
    """Held-out tasks measured at a version. Written by Evaluation's activities."""

    __tablename__ = "evaluations"
    __table_args__ = (UniqueConstraint("run_id", "version"),)
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    version: Mapped[int]
    started_at: Mapped[dt.datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[dt.datetime | None]
    success: Mapped[float | None]  # share of valid rollouts with reward >= 1
    mean_reward: Mapped[float | None]
    n_valid: Mapped[int | None]


class Group(Base):
    """The rollouts of one task in one step, or in one evaluation. Written by the step's activities."""

    __tablename__ = "groups"
    __table_args__ = (
        UniqueConstraint("step_id", "position"),
        UniqueConstraint("evaluation_id", "position"),
        _one_of("state", "open", "settled", "handed_out"),
        _one_of("outcome", "trained", "no_variance", "low_variance", "too_few_valid", "evaluation"),
        CheckConstraint("(step_id IS NULL) <> (evaluation_id IS NULL)", name="one_parent"),
    )
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), index=True)
    step_id: Mapped[int | None] = mapped_column(ForeignKey("steps.id"))
    evaluation_id: Mapped[int | None] = mapped_column(ForeignKey("evaluations.id"))
    position: Mapped[int]
    task: Mapped[str]  # task name, org/name
    task_path: Mapped[str]
    family: Mapped[str]  # metadata.family of the task, or ''
    state: Mapped[str] = mapped_column(server_default="open")  # open | settled | handed_out
    outcome: Mapped[str | None]  # trained | no_variance | low_variance | too_few_valid | evaluation
    baseline: Mapped[float | None]  # mean of the valid rewards
    reward_std: Mapped[float | None]
    settled_at: Mapped[dt.datetime | None]


class Rollout(Base):
    """One harness run on one task. Written by Rollout's activities."""

    __tablename__ = "rollouts"
    __table_args__ = (
        UniqueConstraint("group_id", "member"),
        Index(None, "run_id", "state"),
        _one_of("state", "pending", "running", "scoring", "settled"),
        _one_of("outcome", "completed", "timeout", "harness_error", "infrastructure", "evaluator", "surplus"),
        _finite("reward"),
        _one_of("drop_reason", "stale"),
        _finite("advantage"),
        CheckConstraint("exclude_reason IS NULL OR reward IS NULL", name="excluded_has_no_reward"),
        CheckConstraint(
            "state <> 'settled' OR (outcome IS NOT NULL AND (reward IS NULL) = (exclude_reason IS NOT NULL))",
            name="settled_is_rewarded_or_excluded",
        ),
    )
    id: Mapped[str] = mapped_column(primary_key=True)  # made by gyre.store.names.rollout_id
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    group_id: Mapped[int] = mapped_column(ForeignKey("groups.id"))
    member: Mapped[int]
    token: Mapped[str] = mapped_column(unique=True)  # unguessable path prefix and API key
    state: Mapped[str] = mapped_column(server_default="pending")  # pending | running | scoring | settled
    outcome: Mapped[str | None]  # completed | timeout | harness_error | infrastructure | evaluator | surplus
    exclude_reason: Mapped[str | None]  # set: reward is not used (and is NULL)
    drop_reason: Mapped[str | None]  # set: its reward counts in its group, its tokens are not trained: stale
    min_version: Mapped[int]  # the gateway routes only to cells that serve at least this version
    temperature: Mapped[float]
    harness: Mapped[str]
    host: Mapped[str | None]
    workspace: Mapped[str | None]
    pid: Mapped[int | None]
    exit_code: Mapped[int | None]
    reward: Mapped[float | None]
    advantage: Mapped[float | None]
    baseline: Mapped[float | None]  # mean of the group's rewards that the advantage was taken from, and
    reward_std: Mapped[float | None]  # their standard deviation: under a quorum, of the members settled by then
    created_at: Mapped[dt.datetime] = mapped_column(server_default=func.now())
    prepared_at: Mapped[dt.datetime | None]
    harness_started_at: Mapped[dt.datetime | None]
    harness_ended_at: Mapped[dt.datetime | None]
    scored_at: Mapped[dt.datetime | None]
    settled_at: Mapped[dt.datetime | None]
    handed_out_at: Mapped[dt.datetime | None]  # its samples are fixed; NULL: not yet, or it gives no gradient


class Score(Base):
    """One attempt at scoring. Written by the scoring activity."""

    __tablename__ = "scores"
    __table_args__ = (
        UniqueConstraint("rollout_id", "attempt"),
        _one_of("status", "ok", "no_reward", "bad_reward", "killed", "error"),
        _finite("reward"),
        CheckConstraint("(status = 'ok') = (reward IS NOT NULL)", name="only_ok_has_a_reward"),
    )
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.id"))
    attempt: Mapped[int]
    status: Mapped[str]  # ok | no_reward | bad_reward | killed | error
    reward: Mapped[float | None]
    detail: Mapped[dict[str, Any]] = mapped_column(server_default="{}")  # every key of reward.json, tail of the output
    started_at: Mapped[dt.datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[dt.datetime | None]


class Node(Base):
    """A span of tokens in a rollout's tree; its path is its ancestors' tokens and its own. Written by the gateway."""

    __tablename__ = "nodes"
    __table_args__ = (
        _one_of("kind", "prompt", "generated"),
        CheckConstraint("length > 0 AND octet_length(token_ids) = 4 * length", name="token_ids_fit"),
        CheckConstraint(
            "(kind = 'generated') = (logprobs IS NOT NULL) AND octet_length(logprobs) = 4 * length", name="logprobs_fit"
        ),
        CheckConstraint("(kind = 'generated') = (version_spans IS NOT NULL)", name="generated_has_versions"),
    )
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.id"), index=True)
    parent_id: Mapped[int | None] = mapped_column(ForeignKey("nodes.id"), index=True)
    call_id: Mapped[int | None] = mapped_column(ForeignKey("calls.id"), index=True)  # the call that made it
    kind: Mapped[str]  # prompt | generated
    start: Mapped[int]  # depth in tokens of its first token
    length: Mapped[int]
    token_ids: Mapped[bytes]  # int32[length]
    logprobs: Mapped[bytes | None]  # float32[length], generated only
    version_spans: Mapped[list[Any] | None]  # [[policy version, start, end], ...] relative to the node; generated only


class Call(Base):
    """One model call. Written by the gateway: a row soon after it begins, completed before its last byte is sent."""

    __tablename__ = "calls"
    __table_args__ = (
        UniqueConstraint("rollout_id", "seq"),
        Index("ix_calls_running", "rollout_id", postgresql_where=text("status = 'running'")),
        _one_of("status", "running", "complete", "incomplete", "refused"),
        _one_of("kind", *BRANCH_KINDS),
    )
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.id"))
    seq: Mapped[int]  # order of arrival within the rollout
    api: Mapped[str]  # openai-chat | openai-responses | anthropic-messages
    status: Mapped[str]  # running | complete | incomplete | refused
    kind: Mapped[str]  # kind of branch: main | main-summary | sub-agent | sub-agent-summary | auxiliary
    agent: Mapped[str] = mapped_column(server_default="")  # agent within the rollout; '': the main one, or not known
    leaf_id: Mapped[int | None] = mapped_column(ForeignKey("nodes.id", use_alter=True), index=True)  # generated node
    parent_call_id: Mapped[int | None] = mapped_column(ForeignKey("calls.id"))  # the call whose branch it extends
    fork_reason: Mapped[str | None]  # why it did not simply extend: NULL for an extension, 'root' for a first call
    request_hash: Mapped[str]
    request: Mapped[dict[str, Any]]  # messages as a delta to parent_call_id: {"base": n messages, "messages": [...]}
    response: Mapped[dict[str, Any] | None]
    finish_reason: Mapped[str | None]
    prompt_tokens: Mapped[int | None]
    new_tokens: Mapped[int | None]  # prompt tokens that were tokenised for this call
    cached_tokens: Mapped[int | None]  # as the engine reported
    completion_tokens: Mapped[int | None]
    cells: Mapped[list[str]] = mapped_column(server_default="{}")  # cells that generated for it, in order
    started_at: Mapped[dt.datetime] = mapped_column(server_default=func.now())
    routed_at: Mapped[dt.datetime | None]  # first engine request sent
    first_token_at: Mapped[dt.datetime | None]
    ended_at: Mapped[dt.datetime | None]


class Sample(Base):
    """A branch chosen for training. Written when its rollout is handed out."""

    __tablename__ = "samples"
    __table_args__ = (UniqueConstraint("rollout_id", "leaf_id"),)
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    step_id: Mapped[int] = mapped_column(ForeignKey("steps.id"), index=True)
    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.id"))
    leaf_id: Mapped[int] = mapped_column(ForeignKey("nodes.id"))
    kind: Mapped[str]
    rank: Mapped[int]  # 0: first kept
    n_tokens: Mapped[int]  # length of the branch
    n_targets: Mapped[int]  # owned, policy-generated tokens
    owned_nodes: Mapped[list[int]]  # generated nodes of the path whose tokens this sample owns
    rollout_targets: Mapped[int]  # N_r
    advantage: Mapped[float]
    micro_batch_id: Mapped[int | None] = mapped_column(ForeignKey("micro_batches.id"), index=True)


class MicroBatch(Base):
    """The unit of training work. `holder` is the trainer incarnation in whose memory its gradient lies.

    queued -> claimed (a trainer computes it) -> held (its gradient is in `holder`'s accumulator). A push to central
    moves `holder` to central's incarnation in one transaction; when a holder dies before that, the row is queued
    again. A step is complete when every micro-batch is held by the living central incarnation.
    """

    __tablename__ = "micro_batches"
    __table_args__ = (
        Index(None, "step_id", "state"),
        _one_of("state", "queued", "claimed", "held", "done"),
        CheckConstraint("(state = 'queued') = (holder IS NULL)", name="queued_has_no_holder"),
    )
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    step_id: Mapped[int] = mapped_column(ForeignKey("steps.id"))
    n_tokens: Mapped[int]
    n_targets: Mapped[int]
    state: Mapped[str] = mapped_column(server_default="queued")  # queued | claimed | held | done
    holder: Mapped[str | None]
    computed_by: Mapped[str | None]  # cell that computed the gradient that counted
    attempts: Mapped[int] = mapped_column(server_default="0")
    claimed_at: Mapped[dt.datetime | None]  # once it is computed: when that began
    computed_at: Mapped[dt.datetime | None]
    metrics: Mapped[dict[str, Any]] = mapped_column(server_default="{}")  # see gyre.training.metrics


class Cell(Base):
    """A cell as its agent last reported it. Written by the cell's agent; every update NOTIFYs `gyre_cells`.

    `epoch` rises with each agent that takes the cell: what an earlier one, or its trainer, still wants to commit is
    refused (gyre.store.queries.fence).
    """

    __tablename__ = "cells"
    __table_args__ = (_one_of("role", "rollout", "to_train", "train", "to_rollout", "down"),)
    name: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(primary_key=True)
    central: Mapped[bool]
    epoch: Mapped[int] = mapped_column(server_default="0")
    role: Mapped[str]  # rollout | to_train | train | to_rollout | down
    engine_url: Mapped[str | None]
    routable: Mapped[bool] = mapped_column(server_default="false")
    admits: Mapped[bool] = mapped_column(server_default="true")  # false: keeps its calls, and takes no new ones
    serving_version: Mapped[int | None]
    max_running: Mapped[int]
    kv_tokens: Mapped[int | None]  # of the engine's cache; the gateway fills no more than that
    engine_incarnation: Mapped[str | None]
    trainer_incarnation: Mapped[str | None]
    # of central's trainer, where other machines reach it: {address, token}; the token is a secret of the run's agents
    trainer_endpoint: Mapped[dict[str, Any] | None]
    updated_at: Mapped[dt.datetime] = mapped_column(server_default=func.now(), onupdate=func.now())


class RoleChange(Base):
    """One change of role, with its phases timed. Written by the cell's agent."""

    __tablename__ = "role_changes"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), index=True)
    cell: Mapped[str]
    from_role: Mapped[str]
    to_role: Mapped[str]
    reason: Mapped[str]
    phases: Mapped[dict[str, Any]] = mapped_column(server_default="{}")  # phase -> seconds
    # `before` and each phase -> {engine, trainer}: megabytes of host memory that their processes have after it
    rss_mb: Mapped[dict[str, Any]] = mapped_column(server_default="{}")
    started_at: Mapped[dt.datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[dt.datetime | None]


class WeightVersion(Base):
    """A policy version: a durable checkpoint, and where its weights can be pulled. Written by the central trainer."""

    __tablename__ = "weight_versions"
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    step_id: Mapped[int | None] = mapped_column(ForeignKey("steps.id"))
    checkpoint: Mapped[str]  # folder
    ticket: Mapped[dict[str, Any] | None]  # transfer ticket of the living publisher
    created_at: Mapped[dt.datetime] = mapped_column(server_default=func.now())
    published_at: Mapped[dt.datetime | None]


class CpuSample(Base):
    """CPU seconds that a component used since the sample before. Written by the supervisor."""

    __tablename__ = "cpu_samples"
    __table_args__ = (Index(None, "run_id", "at"),)
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    run_id: Mapped[str | None]
    component: Mapped[str]  # temporal, postgres, gateway, control, rollout-host, harness, agent, engine, trainer
    cell: Mapped[str | None]
    cpu_s: Mapped[float]
    at: Mapped[dt.datetime] = mapped_column(server_default=func.now())
