from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, func, select, text
from sqlalchemy.orm import Session

from gyre.store import queries
from gyre.store.db import transaction
from gyre.store.handout import hand_out
from gyre.store.models import MicroBatch, Sample
from gyre.store.queries import LedgerError
from tests.store.world import RUN, World, add_call, make_world, settle

OPTIONS: dict[str, Any] = {"branch_cap": 5, "micro_batch_tokens": 64, "normalize_std": True}


def trained_step(session: Session, size: int = 4, index: int = 0) -> World:
    """A step of one group, handed out: one micro-batch a rollout (8 tokens each, budget 8)."""
    world = make_world(session, size=size, index=index)
    for i, rollout in enumerate(world.rollouts[0]):
        add_call(session, rollout)
        settle(session, rollout, float(i % 2))
    hand_out(session, world.group_ids[0], **{**OPTIONS, "micro_batch_tokens": 8})
    return world


def hold_all(session: Session, step_id: int, who: str) -> list[int]:
    held = []
    while (found := queries.claim_micro_batch(session, step_id, f"cell-{who}", who)) is not None:
        assert queries.hold_micro_batch(session, found, who, {"n_targets": 3})
        held.append(found)
    return held


def test_claims_are_idempotent_per_incarnation(engine: Engine) -> None:
    with transaction(engine) as s:
        step = trained_step(s).step_id
    with transaction(engine) as s:
        first = queries.claim_micro_batch(s, step, "central", "c1")
    with transaction(engine) as s:
        assert queries.claim_micro_batch(s, step, "central", "c1") == first
        other = queries.claim_micro_batch(s, step, "sat", "s1")
        assert other not in (first, None)
        assert queries.micro_batch_row(s, first or 0).attempts == 1
        assert queries.hold_micro_batch(s, first or 0, "c1", {"seconds": 1.0})
        assert queries.hold_micro_batch(s, first or 0, "c1", {"seconds": 2.0}), "a retried report is no fault"
        assert queries.micro_batch_row(s, first or 0).metrics == {"seconds": 1.0}
        assert queries.claim_micro_batch(s, step, "central", "c1") not in (first, other, None)
        progress = queries.step_progress(s, step)
    assert (progress.queued, progress.claimed, progress.held_by) == (1, 2, {"c1": 1})


def test_a_claim_ahead_leaves_enough_for_the_other_cells_that_train(engine: Engine) -> None:
    with transaction(engine) as s:
        step = trained_step(s, size=4).step_id
        for name, role in (("central", "train"), ("sat", "train"), ("far", "rollout"), ("near", "to_train")):
            queries.upsert_cell(s, RUN, name, central=name == "central", role=role, max_running=4)
    with transaction(engine) as s:
        first = queries.claim_micro_batch(s, step, "central", "c1") or 0
        ahead = queries.claim_ahead(s, step, "central", "c1") or 0  # 3 are queued for 2 others
        assert ahead not in (0, first)
        assert queries.claim_ahead(s, step, "sat", "s1") is None  # 2 for 2
        assert queries.claim_micro_batch(s, step, "central", "c1") == first
    with transaction(engine) as s:
        assert queries.unclaim(s, step, "c1", besides=first) == 1
        back = queries.micro_batch_row(s, ahead)
        assert (back.state, back.holder, back.computed_by, back.attempts) == ("queued", None, None, 0)
        assert queries.micro_batch_row(s, first).state == "claimed"
        assert not queries.hold_micro_batch(s, ahead, "c1", {})
        assert queries.hold_micro_batch(s, first, "c1", {})
        assert queries.unclaim(s, step, "c1") == 0  # what is held is no claim
        again = queries.claim_micro_batch(s, step, "central", "c1") or 0
        s.execute(text("UPDATE cells SET role = 'rollout'"))
        ahead = queries.claim_ahead(s, step, "central", "c1") or 0
    with transaction(engine) as s:
        assert queries.hold_micro_batch(s, again, "c1", {})
        assert queries.hold_micro_batch(s, ahead, "c1", {})
        one, other = queries.micro_batch_row(s, again), queries.micro_batch_row(s, ahead)
        assert other.claimed_at == one.computed_at  # it was claimed before that, and computed after it


def test_concurrent_claims_never_meet(engine: Engine) -> None:
    with transaction(engine) as s:
        step = trained_step(s, size=40).step_id
    taken: list[tuple[str, int]] = []
    start = threading.Barrier(4)

    def work(who: str) -> None:
        start.wait()
        while True:
            with transaction(engine) as s:
                found = queries.claim_micro_batch(s, step, who, who)
                if found is None:
                    return
                assert queries.hold_micro_batch(s, found, who, {})
            taken.append((who, found))

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(taken) == 40
    assert len({found for _, found in taken}) == 40
    with transaction(engine) as s:
        assert queries.step_progress(s, step).held_by == Counter(who for who, _ in taken)


def test_a_locked_row_is_skipped_not_waited_for(engine: Engine) -> None:
    with transaction(engine) as s:
        step = trained_step(s, size=2).step_id
    with transaction(engine) as a, transaction(engine) as b:
        first = queries.claim_micro_batch(a, step, "a", "a")
        second = queries.claim_micro_batch(b, step, "b", "b")
        assert first != second
    with transaction(engine) as s:
        assert queries.claim_micro_batch(s, step, "c", "c") is None


def test_what_a_dead_trainer_had_is_queued_again(engine: Engine) -> None:
    with transaction(engine) as s:
        step = trained_step(s, size=6).step_id
        held = queries.claim_micro_batch(s, step, "sat", "dead") or 0
        queries.hold_micro_batch(s, held, "dead", {"x": 1})
        claimed = queries.claim_micro_batch(s, step, "sat", "dead") or 0
        kept = queries.claim_micro_batch(s, step, "central", "alive") or 0
        queries.hold_micro_batch(s, kept, "alive", {})
    with transaction(engine) as s:
        assert queries.requeue_lost(s, step, {"alive", "newborn"}) == 2
        assert queries.requeue_lost(s, step, {"alive"}) == 0
        for back in (held, claimed):
            row = queries.micro_batch_row(s, back)
            assert (row.state, row.holder, row.computed_by) == ("queued", None, None)
        assert not queries.hold_micro_batch(s, claimed, "dead", {}), "a lost claim is told to its owner"
        assert queries.micro_batch_row(s, claimed).state == "queued"
        assert {queries.claim_micro_batch(s, step, "n", f"n{i}") for i in range(2)} == {held, claimed}
        assert queries.micro_batch_row(s, held).attempts == 2
    with transaction(engine) as s:
        assert queries.requeue_lost(s, step, set()) == 3, "nobody lives"


def test_a_claim_that_somebody_else_has_now_is_lost(engine: Engine) -> None:
    with transaction(engine) as s:
        step = trained_step(s, size=2).step_id
        mine = queries.claim_micro_batch(s, step, "a", "slow") or 0
        queries.requeue_lost(s, step, set())
        assert queries.claim_micro_batch(s, step, "b", "fast") == mine
        assert not queries.hold_micro_batch(s, mine, "slow", {})
        assert queries.hold_micro_batch(s, mine, "fast", {})
        assert not queries.hold_micro_batch(s, mine, "slow", {})
        assert queries.requeue_holder(s, step, "slow") == 0
        assert queries.requeue_holder(s, step, "fast") == 1


def test_a_push_moves_all_or_nothing(engine: Engine) -> None:
    with transaction(engine) as s:
        step = trained_step(s, size=6).step_id
        pushed = []
        for _ in range(3):
            pushed.append(queries.claim_micro_batch(s, step, "sat", "s1") or 0)
            queries.hold_micro_batch(s, pushed[-1], "s1", {})
        late = queries.claim_micro_batch(s, step, "sat", "s1") or 0
    with transaction(engine) as s:
        with pytest.raises(LedgerError, match="does not hold"):
            queries.move_held(s, step, "s1", "c1", [*pushed, late])  # the last one is claimed only
        with pytest.raises(LedgerError, match="does not hold any"):
            queries.move_held(s, step, "nobody", "c1")
        with pytest.raises(LedgerError, match="itself"):
            queries.move_held(s, step, "s1", "s1")
        assert queries.step_progress(s, step).held_by == {"s1": 3}
    with transaction(engine) as s:
        queries.hold_micro_batch(s, late, "s1", {})  # computed after the sum was read
        assert queries.move_held(s, step, "s1", "c1", pushed) == 3
    with transaction(engine) as s:
        assert queries.step_progress(s, step).held_by == {"s1": 1, "c1": 3}
        with pytest.raises(LedgerError):
            queries.move_held(s, step, "s1", "c1", pushed)  # a second absorb of the same push
        assert queries.move_held(s, step, "s1", "c1") == 1
        assert queries.requeue_lost(s, step, {"c1"}) == 0, "what central absorbed outlives the satellite"
        assert set(s.scalars(select(MicroBatch.computed_by).where(MicroBatch.holder == "c1"))) == {"sat"}


def test_a_push_that_races_with_a_requeue_is_void(engine: Engine) -> None:
    with transaction(engine) as s:
        step = trained_step(s, size=2).step_id
        hold_all(s, step, "s1")
    with transaction(engine) as s:
        queries.requeue_lost(s, step, set())
    with transaction(engine) as s, pytest.raises(LedgerError, match="void"):
        queries.move_held(s, step, "s1", "c1")


def test_a_handed_out_group_is_not_handed_out_again(engine: Engine) -> None:
    with transaction(engine) as s:
        world = make_world(s)
        for i, rollout in enumerate(world.rollouts[0]):
            add_call(s, rollout, add_call(s, rollout))
            settle(s, rollout, float(i == 0))
        first = hand_out(s, world.group_ids[0], **OPTIONS)
    with transaction(engine) as s:
        again = hand_out(s, world.group_ids[0], **OPTIONS)
        n = s.scalar(select(func.count()).select_from(Sample)), s.scalar(select(func.count()).select_from(MicroBatch))
        assert n == (4, first.micro_batches)
    assert (first.new, first.closed, first.outcome, first.samples, first.targets) == (4, True, "trained", 4, 24)
    assert first.micro_batches == 1
    assert again == replace(first, new=0)


def test_two_hand_outs_at_once_make_one(engine: Engine) -> None:
    with transaction(engine) as s:
        world = make_world(s)
        for i, rollout in enumerate(world.rollouts[0]):
            add_call(s, rollout)
            settle(s, rollout, float(i))
    results = []

    def work() -> None:
        with transaction(engine) as s:
            results.append(hand_out(s, world.group_ids[0], **OPTIONS))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(r.new for r in results) == [0, 0, 4]
    with transaction(engine) as s:
        assert s.scalar(select(func.count()).select_from(Sample)) == 4


def test_an_evaluation_hands_nothing_out(engine: Engine) -> None:
    with transaction(engine) as s:
        queries.create_run(s, RUN, {}, RUN)
        evaluation = queries.open_evaluation(s, RUN, 0)
        (group,) = queries.create_groups(s, [queries.TaskRef("o/t", "/t")], evaluation_id=evaluation)
        with pytest.raises(ValueError, match="belongs to an evaluation"):
            hand_out(s, group, **OPTIONS)


def test_a_group_waits_for_its_last_member(engine: Engine) -> None:
    with transaction(engine) as s:
        world = make_world(s)
        for rollout in world.rollouts[0][:-1]:
            add_call(s, rollout)
            settle(s, rollout, 1.0)
        with pytest.raises(ValueError, match="00/03"):
            hand_out(s, world.group_ids[0], **OPTIONS)
        with pytest.raises(ValueError, match=r"groups \[0\] are not handed out"):
            queries.close_step(s, world.step_id)


def test_the_denominators_of_the_loss(engine: Engine) -> None:
    """N_r is summed over a rollout's samples; R counts valid rollouts of groups that give a gradient."""
    with transaction(engine) as s:
        world = make_world(s, groups=3)
        branchy, *others = world.rollouts[0]
        shared = add_call(s, branchy, generated=4)
        add_call(s, branchy, shared, generated=2)
        add_call(s, branchy, shared, generated=1)
        for i, rollout in enumerate(others):
            add_call(s, rollout)
            settle(s, rollout, None if i == 0 else 0.0)
        settle(s, branchy, 1.0)
        for rollout in world.rollouts[1]:
            add_call(s, rollout)
            settle(s, rollout, 1.0)
        for i, rollout in enumerate(world.rollouts[2]):
            add_call(s, rollout)
            settle(s, rollout, 1.0 if i == 0 else None)
        outcomes = [hand_out(s, g, **OPTIONS) for g in world.group_ids]
        assert [o.outcome for o in outcomes] == ["trained", "no_variance", "too_few_valid"]
        assert [o.samples for o in outcomes] == [4, 0, 0]
        assert queries.close_step(s, world.step_id) == 3
        assert queries.close_step(s, world.step_id) == 3
        group = queries.group_row(s, world.group_ids[0])
        assert group.baseline == pytest.approx(1 / 3)
        samples = s.scalars(select(Sample).where(Sample.rollout_id == branchy).order_by(Sample.rank)).all()
        assert [(x.n_targets, x.rollout_targets) for x in samples] == [(6, 7), (1, 7)]
        assert samples[0].advantage == samples[1].advantage == queries.rollout_row(s, branchy).advantage
        assert queries.rollout_row(s, others[0]).advantage is None


def test_what_a_trainer_reads(engine: Engine) -> None:
    with transaction(engine) as s:
        world = make_world(s, size=2)
        a, b = world.rollouts[0]
        shared = add_call(s, a, generated=4)
        long = add_call(s, a, shared, generated=6)
        short = add_call(s, a, shared, generated=1)
        add_call(s, b)
        settle(s, a, 1.0)
        settle(s, b, 0.0)
        hand_out(s, world.group_ids[0], **OPTIONS)
        found = queries.claim_micro_batch(s, world.step_id, "c", "c") or 0
        rows = queries.micro_batch_rows(s, found)
        tokens = queries.micro_batch_row(s, found).n_tokens
        queries.hold_micro_batch(s, found, "c", {})
        summary = s.execute(text("SELECT trained_tokens, branch_tokens FROM step_summary")).one()
    first, second, other = rows.samples
    assert [r.rollout_id for r in rows.samples] == [a, a, b]
    assert (first.leaf_id, second.leaf_id) == (long.id, short.id)
    nodes = {n.id: n for n in rows.nodes}
    assert len(nodes) == len(rows.nodes), "a shared node is read once"
    assert tokens == sum(n.length for n in rows.nodes) < sum(r.n_tokens for r in rows.samples)
    assert tuple(summary) == (tokens, sum(r.n_tokens for r in rows.samples))
    owned = {*first.owned_nodes, *second.owned_nodes, *other.owned_nodes}
    for sample in rows.samples:
        path, at = [], sample.leaf_id
        while at is not None:
            path.append(nodes.get(at))
            at = nodes[at].parent_id
        assert sum(n.length for n in path) == sample.n_tokens
        assert sum(n.length for n in path if n.id in sample.owned_nodes) == sample.n_targets
    assert {shared.id, long.id, short.id} < owned
    assert all((n.logprobs is not None) == (n.id in owned) for n in rows.nodes)
    assert [len(n.token_ids) for n in rows.nodes] == [4 * n.length for n in rows.nodes]


def test_the_life_of_a_step(engine: Engine) -> None:
    with transaction(engine) as s:
        queries.create_run(s, RUN, {}, RUN)
        queries.add_weight_version(s, RUN, 0, "/policy")
        world = trained_step(s)
        step = world.step_id
        assert queries.oldest_unfinished_step(s, RUN) == step
        with pytest.raises(LedgerError, match="not closed"):
            queries.finish_step(s, step, 1, {}, "/v1", holder="c1")
        queries.close_step(s, step)
        first = queries.claim_micro_batch(s, step, "sat", "s1") or 0
        queries.hold_micro_batch(s, first, "s1", {})
        hold_all(s, step, "c1")
        assert not queries.step_progress(s, step).complete_at("c1")
        with pytest.raises(LedgerError, match=f"1 micro-batches, first {first}"):
            queries.finish_step(s, step, 1, {}, "/v1", holder="c1")
        queries.move_held(s, step, "s1", "c1")
        assert queries.step_progress(s, step).complete_at("c1")
        assert not queries.step_progress(s, step).complete_at("c2"), "a new incarnation holds nothing"
        with pytest.raises(LedgerError, match="makes version 1, not 2"):
            queries.finish_step(s, step, 2, {}, "/v2", holder="c1")
    with transaction(engine) as s:
        queries.finish_step(s, step, 1, {"loss": 0.5}, "/v1", holder="c1")
    with transaction(engine) as s:
        queries.finish_step(s, step, 1, {"loss": 9.9}, "/other", holder="c2")  # a retry after the commit
        row = queries.step_row(s, step)
        assert (row.state, row.metrics) == ("done", {"loss": 0.5})
        newest = queries.newest_version(s, RUN)
        assert newest is not None and (newest.version, newest.checkpoint, newest.step_id) == (1, "/v1", step)
        assert queries.step_progress(s, step).done == 4
        assert queries.requeue_lost(s, step, set()) == 0, "a done step is never opened again"
        assert queries.oldest_unfinished_step(s, RUN) is None


def test_a_step_without_a_gradient_still_makes_a_version(engine: Engine) -> None:
    with transaction(engine) as s:
        world = make_world(s)
        for rollout in world.rollouts[0]:
            add_call(s, rollout)
            settle(s, rollout, 1.0)
        hand_out(s, world.group_ids[0], **OPTIONS)
        assert queries.close_step(s, world.step_id) == 0
        assert queries.step_progress(s, world.step_id).complete_at("c1")
        queries.finish_step(s, world.step_id, 1, {}, "/v1", holder="c1")


def test_tickets_and_checkpoints(engine: Engine) -> None:
    with transaction(engine) as s:
        queries.create_run(s, RUN, {}, RUN)
        step = queries.open_step(s, RUN, 0, 0)
        for version in range(5):
            queries.add_weight_version(s, RUN, version, f"/v{version}", step if version == 1 else None)
        with pytest.raises(queries.MissingRow, match="no version 9"):
            queries.set_ticket(s, RUN, 9, {})
        assert queries.newest_version(s, RUN, published=True) is None
        queries.set_ticket(s, RUN, 1, {"address": "a"})
        published = queries.newest_version(s, RUN, published=True)
        assert published is not None and published.version == 1
        stamp = published.published_at
        queries.set_ticket(s, RUN, 1, {"address": "b"})
        again = queries.weight_version(s, RUN, 1)
        assert again is not None and (again.ticket, again.published_at) == ({"address": "b"}, stamp)
        assert queries.step_row(s, step).published_at is not None
        assert [v.version for v in queries.stale_checkpoints(s, RUN, 2)] == [1, 2]
        assert queries.weight_version(s, RUN, 7) is None
