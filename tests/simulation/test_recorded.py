"""A recorded run as a scenario: out of rows with known numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from gyre.cli.main import run_command
from gyre.config import RunConfig
from gyre.simulation.recorded import RecordingError, read_recording
from gyre.simulation.trace import read_trace, write_trace
from gyre.store import queries
from gyre.store.db import transaction
from gyre.store.handout import hand_out
from tests.store.world import RUN, add_call, make_world, settle

CONFIG = {
    "name": "demo", "steps": 2, "policy": {"path": "/p"}, "tasks": {"train": "/t"},
    "rollouts": {"groups_per_step": 1, "group_size": 2, "max_concurrent": 1, "time_limit_s": 50},
    "serving": {"max_running": 3}, "trainer": {"micro_batch_tokens": 64},
    "cells": [{"name": "b"}, {"name": "a", "central": True}],
}  # fmt: skip
BEGAN = 1000.0


def at(s: Session, table: str, where: str, **times: float | None) -> None:
    """Set timestamps to seconds after a fixed moment."""
    columns = ", ".join(f"{name} = to_timestamp(:{name})" for name in times)
    s.execute(text(f"UPDATE {table} SET {columns} WHERE {where}"), {k: None if v is None else BEGAN + v for k, v in
                                                                    times.items()})  # fmt: skip


def record(s: Session, index: int, began: float) -> None:
    """A step of two rollouts, one after the other: the window holds one. Each calls once, generates 11 tokens in 2 s,
    and is settled 12 s after its launch."""
    world = make_world(s, groups=1, size=2, index=index)
    config = RunConfig.model_validate(CONFIG).model_dump(mode="json")
    s.execute(text("UPDATE runs SET config = CAST(:c AS jsonb)"), {"c": json.dumps(config)})
    for i, rollout in enumerate(world.rollouts[0]):
        launch = began + 12.0 * i
        add_call(s, rollout, prompt=30, generated=11, versions=[[index, 0, 11]])
        settle(s, rollout, float(i))
        mine = f"rollout_id = '{rollout}'"
        at(
            s,
            "calls",
            mine,
            started_at=launch + 3,
            routed_at=launch + 4,
            first_token_at=launch + 5,
            ended_at=launch + 7,
        )
        s.execute(text(f"UPDATE calls SET cells = ARRAY['a'], cached_tokens = 10 WHERE {mine}"))
        at(s, "rollouts", f"id = '{rollout}'", created_at=began, settled_at=launch + 12)
    hand_out(s, world.group_ids[0], branch_cap=5, micro_batch_tokens=64, normalize_std=True)
    at(s, "groups", f"id = {world.group_ids[0]}", settled_at=began + 24.5)
    for n in range(2):
        batch = queries.claim_micro_batch(s, world.step_id, "a", "a1")
        if batch is None:
            break
        assert queries.hold_micro_batch(s, batch, "a1", {})
        at(s, "micro_batches", f"id = {batch}", claimed_at=began + 26 + n, computed_at=began + 27 + n)
    at(s, "steps", f"id = {world.step_id}", started_at=began, published_at=began + 30)


def test_what_a_run_did_is_read_back(engine: Engine, tmp_path: Path) -> None:
    with transaction(engine) as s:
        record(s, 0, 0.0)
        record(s, 1, 40.0)
        for role, seconds in (("train", 1.0), ("train", 3.0), ("rollout", 0.5)):
            change = queries.start_role_change(s, RUN, "a", "train" if role == "rollout" else "rollout", role, "why")
            queries.end_role_change(s, change, {})
            at(s, "role_changes", f"id = {change}", started_at=5.0, ended_at=5.0 + seconds)
    found = read_recording(engine, RUN)
    assert found.begins == (0.0, 40.0) and found.settled == (24.0, 64.0) and found.ends == (30.0, 70.0)
    scenario = found.scenario
    assert (scenario.cells, scenario.window, scenario.time_limit_s, scenario.drained) == (2, 1, 50.0, frozenset())
    for step in scenario.steps:
        assert step.before_s is not None and step.after_s is not None
        assert step.before_s.tolist() == [[3.0, 3.0]], "the second was launched when the first was settled"
        assert step.tool_s.tolist() == [[1.0, 1.0]], "prefill; the wait for the cell and decoding are not tools'"
        assert step.tokens.tolist() == [[10.0, 10.0]], "the first token is prefill's"
        assert step.after_s.tolist() == [[5.0, 5.0]]
        assert step.context.tolist() == [[30.0, 30.0]]
        assert step.trained.sum() == 82, "both branches of 41 tokens"
    cost = scenario.cost
    assert cost.token_s(1) == pytest.approx(0.2)
    assert (cost.slots, cost.micro_batch_tokens) == (3, 64.0)
    assert (cost.to_train_s, cost.to_rollout_s) == (2.0, 0.5)
    assert cost.handout_s == pytest.approx(0.5) and cost.open_s == pytest.approx(10.0)
    assert cost.optimizer_s == pytest.approx(30.0 - 28.0)
    write_trace(scenario, tmp_path / "run.json")
    again = read_trace(tmp_path / "run.json")
    assert again.cost == cost and again.window == 1
    assert [s.before_s.tolist() for s in again.steps if s.before_s is not None] == [[[3.0, 3.0]]] * 2
    run = found.replay()
    assert run.settled[0] == pytest.approx(22.0), "one after the other; here nobody makes them wait for a cell"
    assert run.begins[1] - run.ends[0] == pytest.approx(10.0)
    assert run.trained_tokens == 164


def test_groups_stand_in_the_order_of_their_launch(engine: Engine) -> None:
    """Two groups through a window of one; the second by position had its first workspace first."""
    with transaction(engine) as s:
        record(s, 0, 0.0)
        world = make_world(s, groups=2, size=2, index=1)
        launched = [*world.rollouts[1], *world.rollouts[0]]
        for i, rollout in enumerate(launched):
            settle(s, rollout, None)
            at(s, "rollouts", f"id = '{rollout}'", created_at=40.0, prepared_at=41.0 + 10 * i, settled_at=50.0 + 10 * i)
        for group_id in world.group_ids:
            hand_out(s, group_id, branch_cap=5, micro_batch_tokens=64, normalize_std=True)
        at(s, "steps", f"id = {world.step_id}", started_at=40.0, published_at=90.0)
    step = read_recording(engine, RUN).scenario.steps[1]
    assert step.before_s is not None and step.before_s.tolist() == [[10.0, 10.0], [10.0, 10.0]]
    with transaction(engine) as s:
        at(s, "rollouts", f"id = '{launched[3]}'", settled_at=85.0)
    step = read_recording(engine, RUN).scenario.steps[1]
    assert step.before_s is not None and step.before_s.tolist() == [[10.0, 10.0], [10.0, 15.0]], "its group is the last"


def test_surplus_rollouts_go_on_until_their_group_is_complete(engine: Engine) -> None:
    """One has no reward, two have one. Of the four to spare one was ended after a call of 4 s, 2 s of which it
    generated, one before it called, and one was never launched: it held no place."""
    rollouts = {"groups_per_step": 1, "group_size": 2, "over_submit": 4, "max_concurrent": 4, "time_limit_s": 50}
    config = RunConfig.model_validate({**CONFIG, "rollouts": rollouts}).model_dump(mode="json")
    with transaction(engine) as s:
        world = make_world(s, groups=1, size=6)
        s.execute(text("UPDATE runs SET config = CAST(:c AS jsonb)"), {"c": json.dumps(config)})
        for i, rollout in enumerate(world.rollouts[0]):
            if i < 4:
                add_call(s, rollout, prompt=30, generated=11, versions=[[0, 0, 11]])
                mine = f"rollout_id = '{rollout}'"
                at(s, "calls", mine, started_at=3.0, routed_at=3.0, first_token_at=5.0, ended_at=7.0)
                s.execute(text(f"UPDATE calls SET cells = ARRAY['a'] WHERE {mine}"))
            if i < 3:
                settle(s, rollout, [None, 0.0, 1.0][i])
            else:
                queries.settle_rollout(s, rollout, "surplus", None, "surplus")
            settled = 12.0 if i < 3 else 20.0
            at(s, "rollouts", f"id = '{rollout}'", created_at=0.0, settled_at=settled)
            if i < 5:
                at(s, "rollouts", f"id = '{rollout}'", prepared_at=1.0 if i < 4 else 13.0)
        hand_out(s, world.group_ids[0], branch_cap=5, micro_batch_tokens=64, normalize_std=True)
        at(s, "steps", f"id = {world.step_id}", started_at=0.0, published_at=30.0)
    found = read_recording(engine, RUN)
    (step,) = found.scenario.steps
    assert found.scenario.over_submit == 4
    assert step.rewarded is not None and step.rewarded.tolist() == [[0.0, 1.0, 1.0, 1.0, 1.0, 1.0]]
    assert step.before_s is not None and step.before_s.tolist() == [[3.0, 3.0, 3.0, 3.0, 8.0, 0.0]]
    assert step.after_s is not None and step.after_s.tolist() == [[5.0, 5.0, 5.0, 0.0, 0.0, 0.0]]
    assert step.tool_s.tolist() == [[2.0, 2.0, 2.0, 250.0, 500.0, 500.0]], "ten time limits, as it had begun"
    assert step.tokens.tolist() == [[10.0, 10.0, 10.0, 1250.0, 0.0, 0.0]]
    run = found.replay()
    assert run.settled[0] < 20.0, "the group did not wait for them"
    assert run.trained_tokens == step.trained.sum() > 0 and run.surplus_tokens > 0


def test_an_evaluation_empties_the_run(engine: Engine) -> None:
    with transaction(engine) as s:
        record(s, 0, 0.0)
        evaluation = queries.open_evaluation(s, RUN, 1)
        at(s, "evaluations", f"id = {evaluation}", started_at=31.0)
        record(s, 1, 40.0)
    found = read_recording(engine, RUN)
    assert found.scenario.drained == {1} and found.scenario.cost.open_s == 0.0


def test_the_command_prints_measured_and_simulated(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gyre.cli.simulate.read_database", lambda _: engine)
    monkeypatch.setenv("COLUMNS", "200")
    with transaction(engine) as s:
        record(s, 0, 0.0)
        record(s, 1, 40.0)
    trace = tmp_path / "run.json"
    assert run_command(["simulate", "--run", RUN, "--save", str(trace), "--data", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "measured and simulated" in out and "a step is off by" in out and "async 1 of 2 train" in out
    assert run_command(["simulate", str(trace), "--staleness", "0"]) == 0
    assert run_command(["simulate", "--run", "none-s0", "--data", str(tmp_path)]) == 1
    assert "no run 'none-s0'" in capsys.readouterr().err


def test_a_run_that_cannot_be_simulated_is_named(engine: Engine) -> None:
    with pytest.raises(RecordingError, match="no run 'none-s0' in this database"):
        read_recording(engine, "none-s0")
    with transaction(engine) as s:
        make_world(s)
        config = RunConfig.model_validate(CONFIG).model_dump(mode="json")
        s.execute(text("UPDATE runs SET config = CAST(:c AS jsonb)"), {"c": json.dumps(config)})
    with pytest.raises(RecordingError, match="no step has been published yet"):
        read_recording(engine, RUN)
