"""What is known of how long a step's tasks take, out of rows with known numbers."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from gyre.store import queries
from gyre.store.db import transaction
from gyre.store.queries.lengths import OTHER_RUNS, expected_seconds
from tests.store.world import add_call, settle

CONFIG: dict[str, Any] = {
    "policy": {"path": "/p"}, "harness": {"name": "command"}, "tasks": {"train": "/t"},
    "rollouts": {"time_limit_s": 60.0, "group_size": 2},
}  # fmt: skip


def step(s: Session, run: str, index: int, tasks: Sequence[str], config: dict[str, Any] = CONFIG) -> int:
    queries.create_run(s, run, config, run)
    step_id = queries.open_step(s, run, index, index)
    queries.create_groups(s, [queries.TaskRef(f"org/{t}", f"/t/{t}", "") for t in tasks], step_id=step_id)
    return step_id


def group(s: Session, step_id: int, position: int, seconds: Sequence[float | None], complete: bool = True) -> None:
    """Its members ran for these seconds; None: no reward. Those of an incomplete group are settled, and it is not."""
    group_id = queries.step_groups(s, step_id)[position].id
    for rollout, took in zip(
        queries.create_rollouts(s, group_id, len(seconds), temperature=1.0, harness="command"), seconds, strict=True
    ):
        began = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=900.0 if took is None else took)
        queries.set_rollout(s, rollout, harness_started_at=began)
        add_call(s, rollout)
        settle(s, rollout, None if took is None else 1.0)
    if complete:
        valid = sum(took is not None for took in seconds)
        queries.settle_group(s, group_id, "no_variance" if valid > 1 else "too_few_valid", None, None, {})


def expected(s: Session, step_id: int) -> dict[str, int]:
    """What is known of a step's tasks, in whole seconds."""
    groups = queries.step_groups(s, step_id)
    found = expected_seconds(s, [g.id for g in groups])
    return {g.task: round(found[g.id]) for g in groups if g.id in found}


def test_the_newest_complete_group_of_a_task_counts(engine: Engine) -> None:
    with transaction(engine) as s:
        first = step(s, "a-s0", 0, ["x", "y", "z", "other"])
        assert expected(s, first) == {}
        group(s, first, 0, [500, 500])
        group(s, first, 1, [20, None, 40])  # who has no reward says nothing
        group(s, first, 2, [70, None])  # one reward is no group
        group(s, first, 3, [300, 300])
    with transaction(engine) as s:
        second = step(s, "a-s0", 1, ["x", "y"])
        group(s, second, 0, [10, 20])
        group(s, second, 1, [1, 1], complete=False)  # its long members may run
    with transaction(engine) as s:
        third = step(s, "a-s0", 2, ["z", "y", "x", "new"])
        assert expected(s, third) == {"org/x": 15, "org/y": 30}


def test_what_ends_after_a_step_was_opened_does_not_change_its_order(engine: Engine) -> None:
    with transaction(engine) as s:
        first = step(s, "a-s0", 0, ["x", "y"])
        group(s, first, 0, [10, 20])
    with transaction(engine) as s:
        second = step(s, "a-s0", 1, ["x", "y"])
    with transaction(engine) as s:
        group(s, first, 1, [30, 30])
        assert expected(s, second) == {"org/x": 15}


def test_other_runs_tell_of_tasks_that_this_one_has_not_had(engine: Engine) -> None:
    others = [
        ("alike-s1", CONFIG | {"seed": 1}, 40),
        ("slower-s0", CONFIG | {"policy": {"path": "/q"}}, 400),
        ("shorter-s0", CONFIG | {"rollouts": {"time_limit_s": 5.0}}, 4),
    ]
    with transaction(engine) as s:
        for run, config, took in others:
            group(s, step(s, run, 0, ["x", "y"], config), 0, [took, took])
        for run, _, took in others:
            group(s, queries.open_step(s, run, 0, 0), 1, [took, took])
    with transaction(engine) as s:
        first = step(s, "a-s0", 0, ["x", "y"])
        assert expected(s, first) == {"org/x": 40, "org/y": 40}
        group(s, first, 0, [10, 10])
    with transaction(engine) as s:
        group(s, step(s, "alike-s2", 0, ["x"]), 0, [90, 90])  # newer than its own
    with transaction(engine) as s:
        assert expected(s, step(s, "a-s0", 1, ["x", "y"])) == {"org/x": 10, "org/y": 40}


def test_only_the_newest_other_runs_are_asked(engine: Engine) -> None:
    with transaction(engine) as s:
        group(s, step(s, "old-s0", 0, ["x"]), 0, [10, 10])
    for i in range(OTHER_RUNS):
        with transaction(engine) as s:
            step(s, f"newer-s{i}", 0, ["x"])
    with transaction(engine) as s:
        assert expected(s, step(s, "a-s0", 0, ["x"])) == {}
