"""The first tables, the notification that wakes whoever routes calls when a cell changes, and the split of a node."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_NOTIFY = """
CREATE FUNCTION gyre_notify_cells() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('gyre_cells', COALESCE(NEW.run_id, OLD.run_id));
    RETURN NULL;
END $$;
CREATE TRIGGER cells_changed AFTER INSERT OR UPDATE OR DELETE ON cells
    FOR EACH ROW EXECUTE FUNCTION gyre_notify_cells();
"""

_SPLIT = """
CREATE FUNCTION gyre_split_node(old_id bigint, new_id bigint, at int, old_start int, old_length int)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM nodes WHERE id = new_id) THEN
        RETURN; -- it is split already
    END IF;
    INSERT INTO nodes (id, rollout_id, parent_id, call_id, kind, start, length, token_ids)
    SELECT new_id, rollout_id, parent_id, call_id, kind, start, at, substr(token_ids, 1, 4 * at)
      FROM nodes WHERE id = old_id AND kind = 'prompt' AND start = old_start AND length = old_length
                   AND at > 0 AND at < length;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'node % cannot be split at %: it must be a prompt of % tokens from % on, more than that',
                        old_id, at, old_length, old_start
              USING ERRCODE = 'invalid_parameter_value';
    END IF;
    UPDATE nodes SET parent_id = new_id, start = start + at, length = length - at,
                     token_ids = substr(token_ids, 4 * at + 1)
     WHERE id = old_id;
END $$;
"""


def upgrade() -> None:
    op.create_table(
        "cells",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("central", sa.Boolean(), nullable=False),
        sa.Column("epoch", sa.Integer(), server_default="0", nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("engine_url", sa.Text(), nullable=True),
        sa.Column("routable", sa.Boolean(), server_default="false", nullable=False),
        sa.Column("admits", sa.Boolean(), server_default="true", nullable=False),
        sa.Column("serving_version", sa.Integer(), nullable=True),
        sa.Column("max_running", sa.Integer(), nullable=False),
        sa.Column("kv_tokens", sa.Integer(), nullable=True),
        sa.Column("engine_incarnation", sa.Text(), nullable=True),
        sa.Column("trainer_incarnation", sa.Text(), nullable=True),
        sa.Column("trainer_endpoint", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "role IN ('rollout', 'to_train', 'train', 'to_rollout', 'down')", name=op.f("ck_cells_role_known")
        ),
        sa.PrimaryKeyConstraint("name", "run_id", name=op.f("pk_cells")),
    )
    op.create_table(
        "cpu_samples",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=True),
        sa.Column("component", sa.Text(), nullable=False),
        sa.Column("cell", sa.Text(), nullable=True),
        sa.Column("cpu_s", sa.Double(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cpu_samples")),
    )
    op.create_index(op.f("ix_cpu_samples_run_id_at"), "cpu_samples", ["run_id", "at"], unique=False)
    op.create_table(
        "runs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("config", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("state", sa.Text(), server_default="running", nullable=False),
        sa.Column("workflow_id", sa.Text(), nullable=False),
        sa.Column("vocabulary", sa.Text(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "state IN ('running', 'paused', 'done', 'stopped', 'failed', 'archived')", name=op.f("ck_runs_state_known")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
    )
    op.create_table(
        "token_pieces",
        sa.Column("vocabulary", sa.Text(), nullable=False),
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("piece", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("vocabulary", "id", name=op.f("pk_token_pieces")),
    )
    op.create_table(
        "evaluations",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("success", sa.Double(), nullable=True),
        sa.Column("mean_reward", sa.Double(), nullable=True),
        sa.Column("n_valid", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_evaluations_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evaluations")),
        sa.UniqueConstraint("run_id", "version", name=op.f("uq_evaluations_run_id_version")),
    )
    op.create_table(
        "role_changes",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("cell", sa.Text(), nullable=False),
        sa.Column("from_role", sa.Text(), nullable=False),
        sa.Column("to_role", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("phases", postgresql.JSONB(astext_type=sa.Text()), server_default="{}", nullable=False),
        sa.Column("rss_mb", postgresql.JSONB(astext_type=sa.Text()), server_default="{}", nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_role_changes_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_role_changes")),
    )
    op.create_index(op.f("ix_role_changes_run_id"), "role_changes", ["run_id"], unique=False)
    op.create_table(
        "steps",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), server_default="open", nullable=False),
        sa.Column("min_version", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("rollouts_done_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("trained_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("published_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("n_valid", sa.Integer(), nullable=True),
        sa.Column("metrics", postgresql.JSONB(astext_type=sa.Text()), server_default="{}", nullable=False),
        sa.CheckConstraint("state IN ('open', 'closed', 'done')", name=op.f("ck_steps_state_known")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_steps_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_steps")),
        sa.UniqueConstraint("run_id", "index", name=op.f("uq_steps_run_id_index")),
    )
    op.create_table(
        "groups",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("step_id", sa.BigInteger(), nullable=True),
        sa.Column("evaluation_id", sa.BigInteger(), nullable=True),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("task_path", sa.Text(), nullable=False),
        sa.Column("family", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), server_default="open", nullable=False),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("baseline", sa.Double(), nullable=True),
        sa.Column("reward_std", sa.Double(), nullable=True),
        sa.Column("settled_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "outcome IN ('trained', 'no_variance', 'low_variance', 'too_few_valid', 'evaluation')",
            name=op.f("ck_groups_outcome_known"),
        ),
        sa.CheckConstraint("state IN ('open', 'settled', 'handed_out')", name=op.f("ck_groups_state_known")),
        sa.CheckConstraint("(step_id IS NULL) <> (evaluation_id IS NULL)", name=op.f("ck_groups_one_parent")),
        sa.ForeignKeyConstraint(["evaluation_id"], ["evaluations.id"], name=op.f("fk_groups_evaluation_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_groups_run_id")),
        sa.ForeignKeyConstraint(["step_id"], ["steps.id"], name=op.f("fk_groups_step_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_groups")),
        sa.UniqueConstraint("evaluation_id", "position", name=op.f("uq_groups_evaluation_id_position")),
        sa.UniqueConstraint("step_id", "position", name=op.f("uq_groups_step_id_position")),
    )
    op.create_index(op.f("ix_groups_run_id"), "groups", ["run_id"], unique=False)
    op.create_table(
        "micro_batches",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("step_id", sa.BigInteger(), nullable=False),
        sa.Column("n_tokens", sa.Integer(), nullable=False),
        sa.Column("n_targets", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), server_default="queued", nullable=False),
        sa.Column("holder", sa.Text(), nullable=True),
        sa.Column("computed_by", sa.Text(), nullable=True),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("claimed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("computed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("metrics", postgresql.JSONB(astext_type=sa.Text()), server_default="{}", nullable=False),
        sa.CheckConstraint("(state = 'queued') = (holder IS NULL)", name=op.f("ck_micro_batches_queued_has_no_holder")),
        sa.CheckConstraint("state IN ('queued', 'claimed', 'held', 'done')", name=op.f("ck_micro_batches_state_known")),
        sa.ForeignKeyConstraint(["step_id"], ["steps.id"], name=op.f("fk_micro_batches_step_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_micro_batches")),
    )
    op.create_index(op.f("ix_micro_batches_step_id_state"), "micro_batches", ["step_id", "state"], unique=False)
    op.create_table(
        "weight_versions",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("step_id", sa.BigInteger(), nullable=True),
        sa.Column("checkpoint", sa.Text(), nullable=False),
        sa.Column("ticket", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("published_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_weight_versions_run_id")),
        sa.ForeignKeyConstraint(["step_id"], ["steps.id"], name=op.f("fk_weight_versions_step_id")),
        sa.PrimaryKeyConstraint("run_id", "version", name=op.f("pk_weight_versions")),
    )
    op.create_table(
        "rollouts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("group_id", sa.BigInteger(), nullable=False),
        sa.Column("member", sa.Integer(), nullable=False),
        sa.Column("token", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), server_default="pending", nullable=False),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("exclude_reason", sa.Text(), nullable=True),
        sa.Column("drop_reason", sa.Text(), nullable=True),
        sa.Column("min_version", sa.Integer(), nullable=False),
        sa.Column("temperature", sa.Double(), nullable=False),
        sa.Column("harness", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=True),
        sa.Column("workspace", sa.Text(), nullable=True),
        sa.Column("pid", sa.Integer(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("advantage", sa.Double(), nullable=True),
        sa.Column("baseline", sa.Double(), nullable=True),
        sa.Column("reward_std", sa.Double(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("prepared_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("harness_started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("harness_ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("scored_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("settled_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("handed_out_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "advantage > '-Infinity' AND advantage < 'Infinity'", name=op.f("ck_rollouts_advantage_finite")
        ),
        sa.CheckConstraint(
            "outcome IN ('completed', 'timeout', 'harness_error', 'infrastructure', 'evaluator', 'surplus')",
            name=op.f("ck_rollouts_outcome_known"),
        ),
        sa.CheckConstraint("reward > '-Infinity' AND reward < 'Infinity'", name=op.f("ck_rollouts_reward_finite")),
        sa.CheckConstraint(
            "state <> 'settled' OR (outcome IS NOT NULL AND (reward IS NULL) = (exclude_reason IS NOT NULL))",
            name=op.f("ck_rollouts_settled_is_rewarded_or_excluded"),
        ),
        sa.CheckConstraint(
            "state IN ('pending', 'running', 'scoring', 'settled')", name=op.f("ck_rollouts_state_known")
        ),
        sa.CheckConstraint("drop_reason IN ('stale')", name=op.f("ck_rollouts_drop_reason_known")),
        sa.CheckConstraint("exclude_reason IS NULL OR reward IS NULL", name=op.f("ck_rollouts_excluded_has_no_reward")),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name=op.f("fk_rollouts_group_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_rollouts_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollouts")),
        sa.UniqueConstraint("group_id", "member", name=op.f("uq_rollouts_group_id_member")),
        sa.UniqueConstraint("token", name=op.f("uq_rollouts_token")),
    )
    op.create_index(op.f("ix_rollouts_run_id_state"), "rollouts", ["run_id", "state"], unique=False)
    op.create_table(
        "calls",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("api", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("agent", sa.Text(), server_default="", nullable=False),
        sa.Column("leaf_id", sa.BigInteger(), nullable=True),
        sa.Column("parent_call_id", sa.BigInteger(), nullable=True),
        sa.Column("fork_reason", sa.Text(), nullable=True),
        sa.Column("request_hash", sa.Text(), nullable=False),
        sa.Column("request", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("response", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=True),
        sa.Column("new_tokens", sa.Integer(), nullable=True),
        sa.Column("cached_tokens", sa.Integer(), nullable=True),
        sa.Column("completion_tokens", sa.Integer(), nullable=True),
        sa.Column("cells", postgresql.ARRAY(sa.Text()), server_default="{}", nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("routed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("first_token_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "kind IN ('main', 'main-summary', 'sub-agent', 'sub-agent-summary', 'auxiliary')",
            name=op.f("ck_calls_kind_known"),
        ),
        sa.CheckConstraint(
            "status IN ('running', 'complete', 'incomplete', 'refused')", name=op.f("ck_calls_status_known")
        ),
        sa.ForeignKeyConstraint(["parent_call_id"], ["calls.id"], name=op.f("fk_calls_parent_call_id")),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name=op.f("fk_calls_rollout_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_calls")),
        sa.UniqueConstraint("rollout_id", "seq", name=op.f("uq_calls_rollout_id_seq")),
    )
    op.create_index(op.f("ix_calls_leaf_id"), "calls", ["leaf_id"], unique=False)
    op.create_index(
        "ix_calls_running", "calls", ["rollout_id"], unique=False, postgresql_where=sa.text("status = 'running'")
    )
    op.create_table(
        "scores",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("detail", postgresql.JSONB(astext_type=sa.Text()), server_default="{}", nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(status = 'ok') = (reward IS NOT NULL)", name=op.f("ck_scores_only_ok_has_a_reward")),
        sa.CheckConstraint("reward > '-Infinity' AND reward < 'Infinity'", name=op.f("ck_scores_reward_finite")),
        sa.CheckConstraint(
            "status IN ('ok', 'no_reward', 'bad_reward', 'killed', 'error')", name=op.f("ck_scores_status_known")
        ),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name=op.f("fk_scores_rollout_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_scores")),
        sa.UniqueConstraint("rollout_id", "attempt", name=op.f("uq_scores_rollout_id_attempt")),
    )
    op.create_table(
        "nodes",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("parent_id", sa.BigInteger(), nullable=True),
        sa.Column("call_id", sa.BigInteger(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("start", sa.Integer(), nullable=False),
        sa.Column("length", sa.Integer(), nullable=False),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=True),
        sa.Column("version_spans", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.CheckConstraint(
            "(kind = 'generated') = (logprobs IS NOT NULL) AND octet_length(logprobs) = 4 * length",
            name=op.f("ck_nodes_logprobs_fit"),
        ),
        sa.CheckConstraint(
            "(kind = 'generated') = (version_spans IS NOT NULL)", name=op.f("ck_nodes_generated_has_versions")
        ),
        sa.CheckConstraint("kind IN ('prompt', 'generated')", name=op.f("ck_nodes_kind_known")),
        sa.CheckConstraint("length > 0 AND octet_length(token_ids) = 4 * length", name=op.f("ck_nodes_token_ids_fit")),
        sa.ForeignKeyConstraint(["call_id"], ["calls.id"], name=op.f("fk_nodes_call_id")),
        sa.ForeignKeyConstraint(["parent_id"], ["nodes.id"], name=op.f("fk_nodes_parent_id")),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name=op.f("fk_nodes_rollout_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
    )
    op.create_foreign_key(op.f("fk_calls_leaf_id"), "calls", "nodes", ["leaf_id"], ["id"])
    op.create_index(op.f("ix_nodes_call_id"), "nodes", ["call_id"], unique=False)
    op.create_index(op.f("ix_nodes_parent_id"), "nodes", ["parent_id"], unique=False)
    op.create_index(op.f("ix_nodes_rollout_id"), "nodes", ["rollout_id"], unique=False)
    op.create_table(
        "samples",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("step_id", sa.BigInteger(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("leaf_id", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("n_tokens", sa.Integer(), nullable=False),
        sa.Column("n_targets", sa.Integer(), nullable=False),
        sa.Column("owned_nodes", postgresql.ARRAY(sa.BigInteger()), nullable=False),
        sa.Column("rollout_targets", sa.Integer(), nullable=False),
        sa.Column("advantage", sa.Double(), nullable=False),
        sa.Column("micro_batch_id", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["leaf_id"], ["nodes.id"], name=op.f("fk_samples_leaf_id")),
        sa.ForeignKeyConstraint(["micro_batch_id"], ["micro_batches.id"], name=op.f("fk_samples_micro_batch_id")),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name=op.f("fk_samples_rollout_id")),
        sa.ForeignKeyConstraint(["step_id"], ["steps.id"], name=op.f("fk_samples_step_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_samples")),
        sa.UniqueConstraint("rollout_id", "leaf_id", name=op.f("uq_samples_rollout_id_leaf_id")),
    )
    op.create_index(op.f("ix_samples_micro_batch_id"), "samples", ["micro_batch_id"], unique=False)
    op.create_index(op.f("ix_samples_step_id"), "samples", ["step_id"], unique=False)
    op.execute(_NOTIFY)
    op.execute(_SPLIT)


def downgrade() -> None:
    op.execute("DROP FUNCTION gyre_notify_cells CASCADE")
    op.execute("DROP FUNCTION gyre_split_node")
    op.drop_constraint(op.f("fk_calls_leaf_id"), "calls")
    op.drop_index(op.f("ix_samples_step_id"), table_name="samples")
    op.drop_index(op.f("ix_samples_micro_batch_id"), table_name="samples")
    op.drop_table("samples")
    op.drop_index(op.f("ix_nodes_rollout_id"), table_name="nodes")
    op.drop_index(op.f("ix_nodes_parent_id"), table_name="nodes")
    op.drop_index(op.f("ix_nodes_call_id"), table_name="nodes")
    op.drop_table("nodes")
    op.drop_table("scores")
    op.drop_index("ix_calls_running", table_name="calls", postgresql_where=sa.text("status = 'running'"))
    op.drop_index(op.f("ix_calls_leaf_id"), table_name="calls")
    op.drop_table("calls")
    op.drop_index(op.f("ix_rollouts_run_id_state"), table_name="rollouts")
    op.drop_table("rollouts")
    op.drop_table("weight_versions")
    op.drop_index(op.f("ix_micro_batches_step_id_state"), table_name="micro_batches")
    op.drop_table("micro_batches")
    op.drop_index(op.f("ix_groups_run_id"), table_name="groups")
    op.drop_table("groups")
    op.drop_table("steps")
    op.drop_index(op.f("ix_role_changes_run_id"), table_name="role_changes")
    op.drop_table("role_changes")
    op.drop_table("evaluations")
    op.drop_table("runs")
    op.drop_table("token_pieces")
    op.drop_index(op.f("ix_cpu_samples_run_id_at"), table_name="cpu_samples")
    op.drop_table("cpu_samples")
    op.drop_table("cells")
