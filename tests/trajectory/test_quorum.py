"""A group that is handed out in parts: whoever settles when, each rewarded rollout is trained once, by the formula."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

from gyre.store import queries
from gyre.store.db import transaction
from gyre.store.handout import HandOut, hand_out
from gyre.store.models import Group, MicroBatch, Rollout, Sample
from tests.store.world import add_call, make_world, settle

_runs = itertools.count()
MIN_STD = 1e-2
OPTIONS: dict[str, Any] = {"branch_cap": 2, "micro_batch_tokens": 24, "min_std": MIN_STD}
ENDS = (0.0, 1.0, 0.5, 0.5, 0.501, "evaluator", "infrastructure", "surplus")


@dataclass
class Expected:
    """One group as the rules want it, kept beside the database."""

    members: list[str]
    quorum: int | None
    normalize: bool
    ends: dict[str, float | str] = field(default_factory=dict)
    handed: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Rollout -> advantage, and the mean and deviation it was made from."""
    outcome: str | None = None

    def rewards(self) -> dict[str, float]:
        return {r: e for r, e in self.ends.items() if isinstance(e, float)}

    def hand_out(self) -> bool:
        """Move on; False: it may not be handed out yet."""
        rewards, complete = self.rewards(), len(self.ends) == len(self.members)
        if self.outcome is not None:
            return True
        if not complete and (self.quorum is None or len(rewards) < self.quorum):
            return False
        values = list(rewards.values())
        outcome = "trained"
        if len(values) < 2:
            outcome = "too_few_valid"
        elif len(set(values)) == 1:
            outcome = "no_variance"
        elif not self.handed and statistics.pstdev(values) < MIN_STD:
            outcome = "low_variance"
        if outcome == "trained":
            mean, std = statistics.fmean(values), statistics.pstdev(values)
            for rollout, reward in rewards.items():
                scale = std + 1e-6 if self.normalize else 1.0
                self.handed.setdefault(rollout, ((reward - mean) / scale, mean, std))
        self.outcome = outcome if complete else None
        return True


def grow(s: Session, rollout: str, draw: st.DataObject) -> int:
    """Up to three branches; how many tokens were sampled."""
    root = add_call(s, rollout, versions=[[2, 0, 3]])
    sizes = draw.draw(st.lists(st.integers(1, 6), max_size=3), "branches")
    for size in sizes:
        add_call(s, rollout, root, generated=size, versions=[[draw.draw(st.sampled_from([2, 2, 2, 1])), 0, size]])
    return 3 + sum(sizes)


def attempt(s: Session, group: int, wanted: Expected, quorum: int | None, crash: bool) -> HandOut | None:
    """One call of the activity; with `crash` a first one dies before its commit."""

    def call() -> HandOut:
        return hand_out(s, group, normalize_std=wanted.normalize, quorum=quorum, **OPTIONS)

    before = len(wanted.handed)
    if not wanted.hand_out():
        with pytest.raises(ValueError, match="are not settled"):
            call()
        return None
    if crash:
        with s.begin_nested() as lost:
            call()
            lost.rollback()
        s.expire_all()
    done, again = call(), call()
    assert done.new == len(wanted.handed) - before
    assert again.new == 0 and (again.samples, again.tokens, again.closed) == (done.samples, done.tokens, done.closed)
    return done


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(draw=st.data())
def test_every_rewarded_rollout_is_handed_out_once(engine: Engine, draw: st.DataObject) -> None:
    run = f"quorum-{next(_runs)}"
    size = draw.draw(st.integers(2, 6), "size")
    quorum = draw.draw(st.one_of(st.none(), st.integers(2, size)), "quorum")
    normalize = draw.draw(st.booleans(), "normalize")
    with transaction(engine) as s:
        queries.create_run(s, run, {}, run)
        step = queries.open_step(s, run, 3, min_version=2)
        tasks = [queries.TaskRef(f"o/{i}", f"/{i}") for i in range(draw.draw(st.integers(1, 2), "groups"))]
        groups = queries.create_groups(s, tasks, step_id=step)
        worlds = {
            g: Expected(queries.create_rollouts(s, g, size, temperature=1.0, harness="command"), quorum, normalize)
            for g in groups
        }
        sampled = {r: grow(s, r, draw) for w in worlds.values() for r in w.members}
        for rollout in draw.draw(st.permutations(sorted(sampled)), "order"):
            group, wanted = next((g, w) for g, w in worlds.items() if rollout in w.members)
            end = draw.draw(st.sampled_from(ENDS), "end")
            wanted.ends[rollout] = end
            if isinstance(end, float):
                settle(s, rollout, end)
            else:
                queries.settle_rollout(s, rollout, end, None, end)  # type: ignore[arg-type]
            last = len(wanted.ends) == size
            if last or draw.draw(st.booleans(), "looks"):
                done = attempt(s, group, wanted, quorum, draw.draw(st.booleans(), "crash"))
                assert done is None or done.closed == last
        divisor = queries.close_step(s, step)
    with transaction(engine) as s:
        _check(s, run, worlds, sampled, divisor)


def _check(s: Session, run: str, worlds: dict[int, Expected], sampled: dict[str, int], divisor: int) -> None:
    fates: dict[str, Counter[str]] = {r: Counter() for r in sampled}
    for row in s.execute(text("SELECT rollout_id, fate, tokens FROM token_accounting WHERE run_id = :r"), {"r": run}):
        fates[row.rollout_id][row.fate] += row.tokens
    trained = 0
    for group, wanted in worlds.items():
        row = s.get_one(Group, group)
        assert (row.state, row.outcome) == ("handed_out", wanted.outcome)
        if rewards := list(wanted.rewards().values()):
            assert row.baseline == pytest.approx(statistics.fmean(rewards))
        for rollout in wanted.members:
            r = s.get_one(Rollout, rollout)
            samples = s.scalars(select(Sample).where(Sample.rollout_id == rollout)).all()
            assert fates[rollout].total() == sampled[rollout]
            assert (rollout in wanted.handed) == (r.handed_out_at is not None)
            if rollout not in wanted.handed:
                assert not samples and r.advantage is None
                end = wanted.ends[rollout]
                expected = wanted.outcome if isinstance(end, float) else end if end == "surplus" else f"excluded_{end}"
                assert set(fates[rollout]) == {expected}
                continue
            assert wanted.outcome == "trained"
            assert (r.advantage, r.baseline, r.reward_std) == pytest.approx(wanted.handed[rollout], abs=1e-9)
            if r.drop_reason == "stale":
                assert not samples and fates[rollout] == {"stale": sampled[rollout]}
                continue
            trained += 1
            targets = sum(x.n_targets for x in samples)
            assert {(x.advantage, x.rollout_targets) for x in samples} == {(r.advantage, targets)}
            owned = [n for x in samples for n in x.owned_nodes]
            assert len(owned) == len(set(owned)) and all(x.micro_batch_id for x in samples)
            assert fates[rollout]["queued"] == targets
            assert set(fates[rollout]) <= {"queued", "not_kept"}
    assert divisor == trained
    mine = select(MicroBatch).join(Sample).join(Rollout).where(Rollout.run_id == run).distinct()
    batches = s.scalars(mine).all()
    assert sum(b.n_targets for b in batches) == sum(c["queued"] for c in fates.values())
    assert {b.state for b in batches} <= {"queued"}


def test_a_group_without_variance_at_its_quorum_waits(engine: Engine) -> None:
    options = {**OPTIONS, "normalize_std": False, "quorum": 2}
    with transaction(engine) as s:
        world = make_world(s, size=5, index=3)
        group, members = world.group_ids[0], world.rollouts[0]
        for rollout in members:
            add_call(s, rollout, versions=[[3, 0, 3]])
        settle(s, members[0], 1.0)
        with pytest.raises(ValueError, match="of the 2 rewards of a quorum there are 1"):
            hand_out(s, group, **options)
        settle(s, members[1], 1.0)
        assert (waits := hand_out(s, group, **options)).outcome == "open" and waits.new == waits.samples == 0
        with pytest.raises(ValueError, match="not handed out"):
            queries.close_step(s, world.step_id)
        settle(s, members[2], None)
        settle(s, members[3], 0.0)
        assert hand_out(s, group, **options).new == 3
        with pytest.raises(ValueError, match="not handed out"):
            queries.close_step(s, world.step_id)
        progress = queries.step_progress(s, world.step_id)
        assert progress.queued > 0 and progress.groups_open == 1
        settle(s, members[4], 1.0)
        last = hand_out(s, group, **options)
        assert (last.new, last.closed, last.outcome, last.n_valid, last.samples) == (1, True, "trained", 4, 4)
        advantages = [queries.rollout_row(s, r).advantage for r in members]
        assert advantages.pop(2) is None
        assert advantages == pytest.approx([1 / 3, 1 / 3, -2 / 3, 0.25])
        assert queries.close_step(s, world.step_id) == 4
