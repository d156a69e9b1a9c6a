"""What a group's hand-out decides besides the samples: staleness, variance, denominators, timeouts."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, select, text

from gyre.store import queries
from gyre.store.db import transaction
from gyre.store.handout import hand_out
from gyre.store.models import Sample
from tests.store.world import add_call, make_world, settle

OPTIONS: dict[str, Any] = {"branch_cap": 1, "micro_batch_tokens": 64, "normalize_std": False}


def fates(session: Any, rollout: str) -> dict[str, int]:
    query = "SELECT fate, sum(tokens)::int FROM token_accounting WHERE rollout_id = :r GROUP BY fate"
    return dict(session.execute(text(query), {"r": rollout}).all())


@pytest.mark.parametrize(
    "spans, stale",
    [
        ([[3, 0, 4]], False),
        ([[2, 0, 4]], True),
        ([[3, 0, 3], [4, 3, 4]], False),
        ([[2, 0, 1], [3, 1, 4]], True),  # one old token at the beginning of a call that a weight update interrupted
        ([[4, 0, 4]], False),
    ],
)
def test_staleness_goes_by_the_oldest_span_of_what_is_owned(
    engine: Engine, spans: list[list[int]], stale: bool
) -> None:
    """Step 3 takes versions from 3 on. A stale rollout keeps its place in the baseline, and is not trained."""
    with transaction(engine) as s:
        world = make_world(s, index=3)
        old, *others = world.rollouts[0]
        first = add_call(s, old, generated=4, versions=spans)
        add_call(s, old, first, generated=2, versions=[[3, 0, 2]])
        for rollout in others:
            add_call(s, rollout, versions=[[3, 0, 3]])
        for i, rollout in enumerate(world.rollouts[0]):
            settle(s, rollout, float(i == 0))
        done = hand_out(s, world.group_ids[0], **OPTIONS)
        assert done.outcome == "trained"
        assert queries.group_row(s, world.group_ids[0]).baseline == 0.25
        assert queries.rollout_row(s, old).drop_reason == ("stale" if stale else None)
        trained = set(s.scalars(select(Sample.rollout_id)))
        assert trained == set(others) | (set() if stale else {old})
        assert fates(s, old) == ({"stale": 6} if stale else {"queued": 6})
        assert queries.close_step(s, world.step_id) == (3 if stale else 4)
        row = s.execute(text("SELECT stale, valid FROM step_summary")).one()
        assert (row.stale, row.valid) == (int(stale), 4)


@pytest.mark.parametrize("what", ["auxiliary", "incomplete", "not_kept"])
def test_old_tokens_that_are_not_owned_make_nothing_stale(engine: Engine, what: str) -> None:
    with transaction(engine) as s:
        world = make_world(s, index=3, size=2)
        rollout = world.rollouts[0][0]
        add_call(s, rollout, generated=9, versions=[[3, 0, 9]])
        options = {"not_kept": {}, "auxiliary": {"kind": "auxiliary"}, "incomplete": {"status": "incomplete"}}
        add_call(s, rollout, generated=2, versions=[[1, 0, 2]], **options[what])  # type: ignore[arg-type]
        add_call(s, world.rollouts[0][1], versions=[[3, 0, 3]])
        for i, member in enumerate(world.rollouts[0]):
            settle(s, member, float(i))
        hand_out(s, world.group_ids[0], **OPTIONS)
        assert queries.rollout_row(s, rollout).drop_reason is None
        assert fates(s, rollout) == {"queued": 9, what: 2}


def test_the_two_denominators(engine: Engine) -> None:
    """Of four groups: one trained (of which one member is stale), one equal, one nearly equal, one with one reward."""
    for denominator, expected in (("trained", 3), ("valid", 13)):
        with transaction(engine) as s:
            world = make_world(s, groups=4, index=3 if denominator == "trained" else 4)
            oldest = world.rollouts[0][0]
            rewards = ([1.0, 0, 0, 0.5], [1.0] * 4, [0.5, 0.5, 0.5, 0.5001], [1.0, None, None, None])
            for group, values in zip(world.rollouts, rewards, strict=True):
                for rollout, reward in zip(group, values, strict=True):
                    version = 0 if rollout == oldest else 4
                    add_call(s, rollout, versions=[[version, 0, 3]])
                    settle(s, rollout, reward)
            outcomes = [hand_out(s, g, min_std=1e-3, **OPTIONS).outcome for g in world.group_ids]
            assert outcomes == ["trained", "no_variance", "low_variance", "too_few_valid"]
            assert queries.close_step(s, world.step_id, denominator) == expected  # type: ignore[arg-type]
            assert queries.step_targets(s, world.step_id) == 9
            row = s.execute(text("SELECT * FROM step_summary WHERE step_id = :s"), {"s": world.step_id}).one()
            counts = (row.groups_trained, row.groups_no_variance, row.groups_low_variance, row.groups_too_few_valid)
            assert counts == (1, 1, 1, 1)
            assert fates(s, world.rollouts[2][0]) == {"low_variance": 3}


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_rollout_at_its_time_limit_is_trained_but_for_the_call_that_was_cut_off(
    engine: Engine, reward: float
) -> None:
    with transaction(engine) as s:
        world = make_world(s, size=2)
        slow, other = world.rollouts[0]
        last = add_call(s, slow, add_call(s, slow, generated=4), generated=5)
        add_call(s, slow, last, generated=7, status="incomplete")
        add_call(s, other)
        queries.settle_rollout(s, slow, "timeout", reward)
        settle(s, other, 1.0 - reward)
        assert hand_out(s, world.group_ids[0], **OPTIONS).targets == 9 + 3
        assert queries.rollout_row(s, slow).advantage == pytest.approx(reward - 0.5)
        assert fates(s, slow) == {"queued": 9, "incomplete": 7}


@pytest.mark.parametrize("branches", [(3, 1), (1, 4), (2, 5)])
def test_branches_move_no_baseline(engine: Engine, branches: tuple[int, int]) -> None:
    """Case 13: rollout A with three branches and reward 1, B with one and reward 0: the baseline is 0.5, not 0.75."""
    with transaction(engine) as s:
        world = make_world(s, size=2)
        for rollout, count, reward in zip(world.rollouts[0], branches, (1.0, 0.0), strict=True):
            shared = add_call(s, rollout)
            for _ in range(count):
                add_call(s, rollout, shared)
            settle(s, rollout, reward)
        done = hand_out(s, world.group_ids[0], **{**OPTIONS, "branch_cap": 5})
        assert done.samples == sum(branches)
        assert queries.group_row(s, world.group_ids[0]).baseline == 0.5
        for rollout, count, advantage in zip(world.rollouts[0], branches, (0.5, -0.5), strict=True):
            samples = s.scalars(select(Sample).where(Sample.rollout_id == rollout)).all()
            assert len(samples) == count
            assert {x.advantage for x in samples} == {advantage}
            # However many branches: the rollout's targets weigh one together.
            assert sum(x.n_targets / x.rollout_targets for x in samples) == pytest.approx(1.0)
