from __future__ import annotations

import datetime as dt
import math

import pytest
from sqlalchemy import Engine, func, select, text, update
from sqlalchemy.exc import IntegrityError

from gyre.store import queries
from gyre.store.db import transaction
from gyre.store.models import Call, Evaluation, Group, Rollout, Score, Step
from tests.store.world import RUN, add_call, make_world, settle

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def test_creation_is_idempotent(engine: Engine) -> None:
    with transaction(engine) as s:
        first = make_world(s, groups=3, size=4)
        tokens = set(s.scalars(select(Rollout.token)))
    with transaction(engine) as s:
        again = make_world(s, groups=3, size=4)
        assert again == first
        assert set(s.scalars(select(Rollout.token))) == tokens
        assert len(tokens) == 12
        for model, n in ((Step, 1), (Group, 3), (Rollout, 12)):
            assert s.scalar(select(func.count()).select_from(model)) == n
    assert first.rollouts[1][2] == f"{RUN}/s0/01/02"


def test_a_steps_tasks_never_change(engine: Engine) -> None:
    with transaction(engine) as s:
        world = make_world(s, groups=2)
    with transaction(engine) as s, pytest.raises(ValueError, match="never change"):
        queries.create_groups(s, [queries.TaskRef("org/other", "/o")] * 2, step_id=world.step_id)
    with transaction(engine) as s, pytest.raises(ValueError, match="exactly one"):
        queries.create_groups(s, [])


def test_missing_rows_are_named(engine: Engine) -> None:
    with transaction(engine) as s:
        for read, key in ((queries.rollout_row, "nobody"), (queries.step_row, 77), (queries.group_row, 78)):
            with pytest.raises(queries.MissingRow, match=str(key)):
                read(s, key)  # type: ignore[arg-type]


def test_progress_is_set_by_column_until_settled(engine: Engine) -> None:
    with transaction(engine) as s:
        rollout = make_world(s).rollouts[0][0]
        add_call(s, rollout)
        assert queries.set_rollout(s, rollout, state="running", pid=7, host="h", harness_started_at=NOW)
        with pytest.raises(ValueError, match="reward"):
            queries.set_rollout(s, rollout, reward=1.0)  # type: ignore[call-arg]
        settle(s, rollout, 1.0)
        assert not queries.set_rollout(s, rollout, state="running", pid=8)
        row = queries.rollout_row(s, rollout)
    assert (row.state, row.pid, row.host, row.harness_started_at) == ("settled", 7, "h", NOW)


def test_the_first_settlement_stays(engine: Engine) -> None:
    with transaction(engine) as s:
        rollout = make_world(s).rollouts[0][0]
        add_call(s, rollout)
        assert settle(s, rollout, 0.25).first
    for late in (1.0, None):
        with transaction(engine) as s:
            result = settle(s, rollout, late)
            assert result == queries.Settled(False, "completed", 0.25, None)
            assert queries.rollout_row(s, rollout).reward == 0.25


def test_settling_does_not_hold_up_the_gateway(engine: Engine) -> None:
    with transaction(engine) as s:
        rollout = make_world(s).rollouts[0][0]
        add_call(s, rollout)
    with transaction(engine) as a, transaction(engine) as b:
        settle(a, rollout, 1.0)
        b.execute(text("SET LOCAL lock_timeout = '2s'"))
        add_call(b, rollout)


@pytest.mark.parametrize("status", [None, "running", "incomplete", "refused"])
def test_without_a_complete_call_it_is_infrastructure(engine: Engine, status: str | None) -> None:
    with transaction(engine) as s:
        rollout = make_world(s).rollouts[0][0]
        if status:
            add_call(s, rollout, status=status)
        result = settle(s, rollout, 1.0)
        row = queries.rollout_row(s, rollout)
    assert result == queries.Settled(True, "infrastructure", None, "no_model_call")
    assert (row.reward, row.exclude_reason, row.settled_at is not None) == (None, "no_model_call", True)


def test_a_call_that_a_dead_gateway_left_is_over_when_its_rollout_is(engine: Engine) -> None:
    with transaction(engine) as s:
        world = make_world(s)
        mine, other = world.rollouts[0][:2]
        add_call(s, mine)
        for rollout in (mine, other):
            add_call(s, rollout, status="running")
        settle(s, mine, 1.0)
    with transaction(engine) as s:
        rows = s.execute(select(Call.rollout_id, Call.status).order_by(Call.id)).all()
    assert rows == [(mine, "complete"), (mine, "incomplete"), (other, "running")]


def test_a_failed_evaluator_keeps_its_own_reason(engine: Engine) -> None:
    with transaction(engine) as s:
        world = make_world(s)
        a, b = world.rollouts[0][:2]
        add_call(s, a)
        for rollout in (a, b):
            assert settle(s, rollout, None) == queries.Settled(True, "evaluator", None, "evaluator_failed")


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_is_a_finite_number_or_null(engine: Engine, reward: float) -> None:
    with transaction(engine) as s:
        rollout = make_world(s).rollouts[0][0]
        add_call(s, rollout)
    with transaction(engine) as s, pytest.raises(ValueError, match="not a finite number"):
        settle(s, rollout, reward)
    # Not even by hand:
    with pytest.raises(IntegrityError, match="reward_finite"), transaction(engine) as s:
        s.execute(update(Rollout).where(Rollout.id == rollout).values(reward=reward))
    with pytest.raises(IntegrityError, match="settled_is_rewarded"), transaction(engine) as s:
        s.execute(text("UPDATE rollouts SET state = 'settled', outcome = 'completed'"))
    with pytest.raises(IntegrityError, match="excluded_has_no_reward"), transaction(engine) as s:
        s.execute(text("UPDATE rollouts SET reward = 0, exclude_reason = 'evaluator_failed'"))


def test_both_or_neither_of_reward_and_reason_is_refused(engine: Engine) -> None:
    with transaction(engine) as s:
        rollout = make_world(s).rollouts[0][0]
        for reward, reason in ((None, None), (1.0, "why")):
            with pytest.raises(ValueError, match="a reward or a reason"):
                queries.settle_rollout(s, rollout, "completed", reward, reason)


def test_scores_are_kept_by_attempt(engine: Engine) -> None:
    with transaction(engine) as s:
        rollout = make_world(s).rollouts[0][0]
        queries.record_score(s, rollout, 1, "no_reward", None, {"tail": "killed"}, NOW)
        queries.record_score(s, rollout, 2, "ok", 0.5, {}, NOW)
        queries.record_score(s, rollout, 2, "ok", 0.7, {}, NOW)
        for status, reward in (("ok", None), ("ok", math.nan), ("killed", 0.0)):
            with pytest.raises(ValueError, match="does not go with"):
                queries.record_score(s, rollout, 3, status, reward, {}, NOW)  # type: ignore[arg-type]
        found = s.execute(select(Score.attempt, Score.status, Score.reward).order_by(Score.attempt)).all()
    assert [tuple(f) for f in found] == [(1, "no_reward", None), (2, "ok", 0.5)]


def test_an_evaluation_counts_valid_rollouts_only(engine: Engine) -> None:
    with transaction(engine) as s:
        queries.create_run(s, RUN, {}, RUN)
        evaluation = queries.open_evaluation(s, RUN, 3)
        assert queries.open_evaluation(s, RUN, 3) == evaluation
        (group,) = queries.create_groups(s, [queries.TaskRef("org/t", "/t")], evaluation_id=evaluation)
        members = queries.create_rollouts(s, group, 4, temperature=0.7, harness="command")
        assert members[0] == f"{RUN}/e3/00/00"
        assert queries.rollout_row(s, members[0]).min_version == 3
        for member, reward in zip(members, (1.0, 0.5, 0.0), strict=False):
            add_call(s, member)
            settle(s, member, reward)
        with pytest.raises(ValueError, match="1 of 4 rollouts are not settled"):
            queries.finish_evaluation(s, evaluation)
        settle(s, members[3], None)
        queries.finish_evaluation(s, evaluation)
    with transaction(engine) as s:
        row = queries.finish_evaluation(s, evaluation)
        assert (row.success, row.mean_reward, row.n_valid) == (pytest.approx(1 / 3), 0.5, 3)
        assert [e.version for e in queries.evaluations(s, RUN)] == [3]
        assert s.scalar(select(func.count()).select_from(Evaluation)) == 1
