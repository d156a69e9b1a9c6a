"""Control activities over real rows: each may run twice, and a resumed run goes on where Postgres says."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
from sqlalchemy import Engine, func, select
from temporalio.testing import ActivityEnvironment

from activities.control import ControlActivities
from gyre.config import RunConfig
from gyre.scheduling import step_tasks
from gyre.store import queries as q
from gyre.store.db import transaction
from gyre.store.models import Group, Rollout
from gyre.tasks.harbor import TaskError
from tests.store.world import add_call, settle
from workflows import messages as m

TASKS = 5


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    for split, count in (("train", TASKS), ("heldout", 2)):
        for i in range(count):
            task = tmp_path / split / f"task-{i}"
            (task / "environment" / "workspace").mkdir(parents=True)
            (task / "tests").mkdir()
            (task / "tests" / "test.sh").write_text("echo 1 > $LOGS_DIR/reward.txt\n")
            (task / "instruction.md").write_text("Do it.\n")
            (task / "task.toml").write_text(f'[task]\nname = "{split}/{i}"\n[metadata]\nfamily = "f{i % 2}"\n')
    return RunConfig.model_validate(
        {
            "name": "c", "seed": 7, "steps": 3, "policy": {"path": str(tmp_path)},
            "tasks": {"train": str(tmp_path / "train"), "heldout": str(tmp_path / "heldout")},
            "rollouts": {"groups_per_step": 3, "group_size": 2, "max_staleness": 1}, "sampling": {"temperature": 0.7},
            "evaluation": {"samples": 3, "temperature": 0.5}, "cells": [{"name": "c0", "central": True}],
        }
    )  # fmt: skip


@pytest.fixture
def control(engine: Engine, config: RunConfig) -> ControlActivities:
    activities = ControlActivities(engine, config)
    ActivityEnvironment().run(activities.open_run, m.OpenRun(config.run_id))
    return activities


def test_opening_a_step_twice_changes_nothing(control: ControlActivities, config: RunConfig, engine: Engine) -> None:
    first = control.open_step(m.OpenStep(config.run_id, 2))
    with transaction(engine) as session:
        tokens = session.scalars(select(Rollout.token).order_by(Rollout.id)).all()
    assert control.open_step(m.OpenStep(config.run_id, 2)) == first
    with transaction(engine) as session:
        assert session.scalars(select(Rollout.token).order_by(Rollout.id)).all() == tokens
        assert session.scalar(select(func.count()).select_from(Group)) == 3
        rollouts = session.scalars(select(Rollout)).all()
        assert {(r.min_version, r.temperature) for r in rollouts} == {(1, 0.7)}  # one step of staleness
    assert first.min_version == 1
    assert [g.task for g in first.groups] == [f"train/{i}" for i in step_tasks(TASKS, 7, 2, 3)]
    assert first.groups[1].rollouts == ["c-s7/s2/01/00", "c-s7/s2/01/01"]


def finish(engine: Engine, groups: list[m.GroupRef], seconds: dict[str, float]) -> None:
    """Each member of a group ran for the seconds of its task, and has a reward."""
    with transaction(engine) as session:
        for group in groups:
            for member, rollout in enumerate(group.rollouts):
                took = dt.timedelta(seconds=seconds[group.task])
                q.set_rollout(session, rollout, harness_started_at=dt.datetime.now(dt.UTC) - took)
                add_call(session, rollout)
                settle(session, rollout, float(member))


@pytest.mark.parametrize("order", ["longest_first", "shuffled"])
def test_a_step_launches_what_took_long_first_and_its_positions_stay(
    control: ControlActivities, config: RunConfig, engine: Engine, order: str
) -> None:
    chosen = config.model_copy(update={"rollouts": config.rollouts.model_copy(update={"order": order}), "seed": 8})
    control = ControlActivities(engine, chosen)
    ActivityEnvironment().run(control.open_run, m.OpenRun(chosen.run_id))
    first, second = (control.open_step(m.OpenStep(chosen.run_id, index)) for index in (0, 1))
    assert [g.position for g in first.groups + second.groups] == [0, 1, 2] * 2, "nothing was measured"
    finish(engine, first.groups + second.groups, {f"train/{i}": 10.0 * i for i in range(TASKS)})
    with transaction(engine) as session:
        for group in first.groups + second.groups:
            q.settle_group(session, group.group_id, "trained", 0.5, 0.5, {})
    third = control.open_step(m.OpenStep(chosen.run_id, 2))
    assert control.open_step(m.OpenStep(chosen.run_id, 2)) == third
    tasks = [f"train/{i}" for i in step_tasks(TASKS, 8, 2, 3)]
    assert tasks != sorted(tasks, reverse=True)
    launched = sorted(tasks, reverse=True) if order == "longest_first" else tasks
    assert [g.task for g in third.groups] == launched
    assert [tasks[g.position] for g in third.groups] == launched
    assert [g.rollouts[1] for g in third.groups] == [f"c-s8/s2/{g.position:02d}/01" for g in third.groups]


def test_an_evaluation_takes_every_heldout_task_at_its_version(
    control: ControlActivities, config: RunConfig, engine: Engine
) -> None:
    opened = control.open_evaluation(m.OpenEvaluation(config.run_id, 2))
    assert control.open_evaluation(m.OpenEvaluation(config.run_id, 2)) == opened
    assert [(g.task, g.family, len(g.rollouts)) for g in opened.groups] == [
        ("heldout/0", "f0", 3),
        ("heldout/1", "f1", 3),
    ]
    with transaction(engine) as session:
        rollouts = session.scalars(select(Rollout)).all()
        assert {(r.min_version, r.temperature) for r in rollouts} == {(2, 0.5)}
    for rollout in rollouts:
        control.settle(m.SettleRollout(config.run_id, rollout.id, "infrastructure", "host_lost"))
    result = control.finish_evaluation(m.FinishEvaluation(config.run_id, opened.evaluation_id))
    assert (result.version, result.success, result.n_valid) == (2, None, 0)


def test_an_evaluation_launches_what_took_long_in_the_last_one_first(
    control: ControlActivities, config: RunConfig, engine: Engine
) -> None:
    opened = control.open_evaluation(m.OpenEvaluation(config.run_id, 0))
    finish(engine, opened.groups, {"heldout/0": 10.0, "heldout/1": 30.0})
    control.finish_evaluation(m.FinishEvaluation(config.run_id, opened.evaluation_id))
    again = control.open_evaluation(m.OpenEvaluation(config.run_id, 1))
    assert [(g.task, g.position) for g in again.groups] == [("heldout/1", 1), ("heldout/0", 0)]


def test_settling_keeps_the_first_result(control: ControlActivities, config: RunConfig) -> None:
    rollout = control.open_step(m.OpenStep(config.run_id, 0)).groups[0].rollouts[0]
    first = control.settle(m.SettleRollout(config.run_id, rollout, "infrastructure", "host_lost"))
    assert control.settle(m.SettleRollout(config.run_id, rollout, "infrastructure", "cancelled")) == first
    assert (first.reward, first.exclude_reason) == (None, "host_lost")


async def test_a_group_without_a_valid_reward_is_handed_out_without_samples(
    control: ControlActivities, config: RunConfig
) -> None:
    step = control.open_step(m.OpenStep(config.run_id, 0))
    for rollout in step.groups[0].rollouts:
        control.settle(m.SettleRollout(config.run_id, rollout, "infrastructure", "host_lost"))
    group = m.HandOut(config.run_id, step.step_id, step.groups[0].group_id)
    handed = await ActivityEnvironment().run(control.hand_out_group, group)
    assert (handed.outcome, handed.tokens, handed.reward) == ("too_few_valid", 0, None)
    assert control.read_cluster(m.ClusterRequest(config.run_id)).backlog_tokens == 0
    with pytest.raises(ValueError, match="not handed out"):
        control.close_step(m.CloseStep(config.run_id, step.step_id))


def test_a_resumed_run_says_how_far_it_came(control: ControlActivities, config: RunConfig, engine: Engine) -> None:
    with transaction(engine) as session:
        q.add_weight_version(session, config.run_id, 0, "/v0")
        q.add_weight_version(session, config.run_id, 1, "/v1")
        done, begun = (q.open_evaluation(session, config.run_id, v) for v in (0, 1))
        q.finish_evaluation(session, done)
        assert begun != done
    opened = ActivityEnvironment().run(control.open_run, m.OpenRun(config.run_id))
    assert opened == m.OpenedRun(TASKS, 2, steps_done=1, version=1, evaluated=[0])
    control.end_run(m.EndRun(config.run_id, "done"))
    with transaction(engine) as session:
        row = q.run_row(session, config.run_id)
        assert row.state == "done" and row.ended_at is not None


def test_a_bad_task_folder_is_named(engine: Engine, config: RunConfig) -> None:
    (config.tasks.train / "task-3" / "instruction.md").unlink()
    control = ControlActivities(engine, config)
    with pytest.raises(TaskError, match=r"task-3/instruction\.md"):
        ActivityEnvironment().run(control.open_run, m.OpenRun(config.run_id))
