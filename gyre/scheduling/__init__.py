"""Scheduling: pure policies from a view of the cluster to the cells' roles, and the order of work.

Temporal's sandbox imports this package, so it has no dependency.
"""

from __future__ import annotations

from collections.abc import Sequence

from gyre.scheduling.colocate import ColocatePolicy
from gyre.scheduling.elastic import ElasticPolicy
from gyre.scheduling.fixed import AsyncPolicy
from gyre.scheduling.order import longest_first, step_tasks
from gyre.scheduling.pace import StepEnd, pace_of
from gyre.scheduling.review import next_look_s
from gyre.scheduling.room import Roomy, with_room
from gyre.scheduling.types import CellView, ClusterView, Decision, Pace, Phase, Policy, Rates, Role, expected_tail_s
from gyre.scheduling.window import Demand, share_window

__all__ = [
    "AsyncPolicy",
    "CellView",
    "ClusterView",
    "ColocatePolicy",
    "Decision",
    "Demand",
    "ElasticPolicy",
    "Pace",
    "Phase",
    "Policy",
    "Rates",
    "Role",
    "Roomy",
    "StepEnd",
    "expected_tail_s",
    "longest_first",
    "make_policy",
    "next_look_s",
    "pace_of",
    "share_window",
    "step_tasks",
    "with_room",
]


def make_policy(name: str, *, train_cells: Sequence[str] = (), min_backlog_tokens: int = 2048) -> Policy:
    """The policy that `scheduling.policy` names. Raises ValueError for an unknown name."""
    match name:
        case "elastic":
            return ElasticPolicy(min_backlog_tokens)
        case "colocate":
            return ColocatePolicy()
        case "async":
            return AsyncPolicy(tuple(train_cells))
    raise ValueError(f"scheduling.policy: no policy is named {name!r}; use elastic, colocate or async")
