"""Every statement that Gyre sends to its database, as typed functions on a Session, by theme.

Each function takes part in the caller's transaction and commits nothing itself. "Idempotent" means: a second call
with the same arguments, for instance by a retried activity, changes nothing and returns the same.
"""

from gyre.store.queries.cells import (
    CellUpdate,
    CpuUse,
    add_cpu_samples,
    cells,
    end_role_change,
    living_trainers,
    start_role_change,
    upsert_cell,
)
from gyre.store.queries.evaluations import evaluations, finish_evaluation, open_evaluation
from gyre.store.queries.fence import FencedError, cell_epoch, check_epoch, take_cell
from gyre.store.queries.groups import TaskRef, create_groups, create_rollouts, group_row, step_groups
from gyre.store.queries.handout import NewSample, add_samples, cut_micro_batches, settle_group
from gyre.store.queries.ledger import (
    LedgerError,
    StepProgress,
    claim_ahead,
    claim_micro_batch,
    held_metrics,
    hold_micro_batch,
    micro_batch_row,
    move_held,
    requeue_holder,
    requeue_lost,
    step_progress,
    unclaim,
)
from gyre.store.queries.rollouts import (
    MemberReward,
    RolloutUpdate,
    Settled,
    group_rewards,
    record_score,
    rollout_row,
    set_rollout,
    settle_rollout,
)
from gyre.store.queries.rows import MissingRow
from gyre.store.queries.runs import create_run, run_row, set_run_state
from gyre.store.queries.samples import MicroBatchRows, NodeRow, SampleRow, micro_batch_rows, trees
from gyre.store.queries.steps import (
    close_step,
    finish_step,
    oldest_unfinished_step,
    open_step,
    step_row,
    step_targets,
    unfinished_steps,
)
from gyre.store.queries.versions import (
    add_weight_version,
    checkpoints,
    newest_version,
    set_ticket,
    stale_checkpoints,
    weight_version,
)

__all__ = [
    "CellUpdate",
    "CpuUse",
    "FencedError",
    "LedgerError",
    "MemberReward",
    "MicroBatchRows",
    "MissingRow",
    "NewSample",
    "NodeRow",
    "RolloutUpdate",
    "SampleRow",
    "Settled",
    "StepProgress",
    "TaskRef",
    "add_cpu_samples",
    "add_samples",
    "add_weight_version",
    "cell_epoch",
    "cells",
    "check_epoch",
    "checkpoints",
    "claim_ahead",
    "claim_micro_batch",
    "close_step",
    "create_groups",
    "create_rollouts",
    "create_run",
    "cut_micro_batches",
    "end_role_change",
    "evaluations",
    "finish_evaluation",
    "finish_step",
    "group_rewards",
    "group_row",
    "held_metrics",
    "hold_micro_batch",
    "living_trainers",
    "micro_batch_row",
    "micro_batch_rows",
    "move_held",
    "newest_version",
    "oldest_unfinished_step",
    "open_evaluation",
    "open_step",
    "record_score",
    "requeue_holder",
    "requeue_lost",
    "rollout_row",
    "run_row",
    "set_rollout",
    "set_run_state",
    "set_ticket",
    "settle_group",
    "settle_rollout",
    "stale_checkpoints",
    "start_role_change",
    "step_groups",
    "step_progress",
    "step_row",
    "step_targets",
    "take_cell",
    "trees",
    "unclaim",
    "unfinished_steps",
    "upsert_cell",
    "weight_version",
]
