"""Names that tie the parts together: task queues and workflow ids. Pure."""

from __future__ import annotations

CONTROL_QUEUE = "gyre-control"
"""Workflows and short database activities."""

ROLLOUTS_QUEUE = "gyre-rollouts"
"""Any rollout host: `prepare`, which binds a rollout to the host that took it."""

SURPLUS = "surplus"
"""Outcome and `exclude_reason` of a rollout that was ended because its group was complete without it."""


def host_queue(host: str) -> str:
    """Queue of one rollout host: everything of a rollout after `prepare`."""
    return f"gyre-rollouts-{host}"


def cell_queue(run_id: str, cell: str) -> str:
    """Queue of one cell's agent."""
    return f"gyre-cell-{run_id}-{cell}"


def run_workflow(run_id: str) -> str:
    """Workflow id of a TrainingRun."""
    return run_id


def step_workflow(run_id: str, index: int) -> str:
    """Workflow id of a TrainingStep."""
    return f"{run_id}/step-{index}"


def scheduler_workflow(run_id: str) -> str:
    """Workflow id of a run's ElasticScheduler."""
    return f"{run_id}/scheduler"


def cell_workflow(run_id: str, cell: str) -> str:
    """Workflow id of a Cell."""
    return f"{run_id}/cell-{cell}"


def evaluation_workflow(run_id: str, version: int) -> str:
    """Workflow id of an Evaluation."""
    return f"{run_id}/eval-v{version}"
