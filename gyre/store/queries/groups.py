"""Groups of a step or of an evaluation, and the rollouts in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from gyre.store.models import Evaluation, Group, Rollout, Step
from gyre.store.names import new_token, rollout_id
from gyre.store.queries.rows import the_row


@dataclass(frozen=True)
class TaskRef:
    """A task as a group remembers it."""

    name: str
    path: str
    family: str = ""


def create_groups(
    session: Session, tasks: Sequence[TaskRef], *, step_id: int | None = None, evaluation_id: int | None = None
) -> list[int]:
    """One group a task, by position, in a step or in an evaluation (exactly one of the two). Idempotent.

    Returns the groups' ids in the order of `tasks`. Raises ValueError if groups exist that belong to other tasks.
    """
    if (step_id is None) == (evaluation_id is None):
        raise ValueError("create_groups: give exactly one of step_id and evaluation_id")
    parent = the_row(session, Step, step_id) if step_id is not None else the_row(session, Evaluation, evaluation_id)
    values = [
        {
            "run_id": parent.run_id,
            "step_id": step_id,
            "evaluation_id": evaluation_id,
            "position": position,
            "task": task.name,
            "task_path": task.path,
            "family": task.family,
        }
        for position, task in enumerate(tasks)
    ]
    if values:
        session.execute(insert(Group).on_conflict_do_nothing(), values)
    groups = _groups(session, step_id, evaluation_id)
    if [g.task for g in groups] != [t.name for t in tasks]:
        raise ValueError(
            f"groups of {'step' if step_id is not None else 'evaluation'} {step_id or evaluation_id}: they exist with "
            f"tasks {[g.task for g in groups]}, not {[t.name for t in tasks]}; a step's tasks never change"
        )
    return [g.id for g in groups]


def step_groups(session: Session, step_id: int) -> list[Group]:
    """The groups of a step, by position."""
    return _groups(session, step_id, None)


def group_row(session: Session, group_id: int) -> Group:
    """The group. Raises MissingRow."""
    return the_row(session, Group, group_id)


def create_rollouts(session: Session, group_id: int, size: int, *, temperature: float, harness: str) -> list[str]:
    """The group's `size` rollouts, each with a token of its own. Idempotent: a token is made once.

    They may be sampled by versions from the step's `min_version`, or from the version that is evaluated.
    Returns the ids by member.
    """
    group = the_row(session, Group, group_id)
    if group.step_id is not None:
        step = the_row(session, Step, group.step_id)
        scope, min_version = f"s{step.index}", step.min_version
    else:
        evaluation = the_row(session, Evaluation, group.evaluation_id)
        scope, min_version = f"e{evaluation.version}", evaluation.version
    ids = [rollout_id(group.run_id, scope, group.position, member) for member in range(size)]
    values = [
        {
            "id": name,
            "run_id": group.run_id,
            "group_id": group_id,
            "member": member,
            "token": new_token(),
            "min_version": min_version,
            "temperature": temperature,
            "harness": harness,
        }
        for member, name in enumerate(ids)
    ]
    if values:
        session.execute(insert(Rollout).on_conflict_do_nothing(index_elements=[Rollout.id]), values)
    return ids


def _groups(session: Session, step_id: int | None, evaluation_id: int | None) -> list[Group]:
    parent = Group.step_id == step_id if step_id is not None else Group.evaluation_id == evaluation_id
    return list(session.scalars(select(Group).where(parent).order_by(Group.position)))
