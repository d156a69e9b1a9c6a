"""What the scheduler measures: the backlog, speeds, and what live rollouts hold, out of rows with known numbers."""

from __future__ import annotations

import datetime as dt

from sqlalchemy import Engine, text, update
from sqlalchemy.orm import Session

from gyre.store import queries
from gyre.store.db import transaction
from gyre.store.handout import hand_out
from gyre.store.models import Call, Rollout
from gyre.store.queries.cluster import SILENT_S, CellFacts, cluster_facts
from tests.store.world import RUN, World, add_call, make_world, settle


def begin(s: Session, rollout: str, seconds_ago: float) -> None:
    """The harness of the rollout runs since then."""
    ago = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=seconds_ago)
    queries.set_rollout(s, rollout, state="running", harness_started_at=ago)


def answered_by(s: Session, rollout: str, *cells: str) -> None:
    newest = text("UPDATE calls SET cells = :cells WHERE id = (SELECT max(id) FROM calls WHERE rollout_id = :id)")
    s.execute(newest, {"cells": list(cells), "id": rollout})


def trained(s: Session, world: World, seconds: list[float]) -> None:
    """The group gives micro-batches of 8 tokens, one a rollout; each takes its seconds."""
    for i, rollout in enumerate(world.rollouts[0]):
        add_call(s, rollout)
        settle(s, rollout, float(i % 2))
    hand_out(s, world.group_ids[0], branch_cap=5, micro_batch_tokens=8, normalize_std=True)
    for took in seconds:
        batch = queries.claim_micro_batch(s, world.step_id, "central", "c1")
        assert batch is not None and queries.hold_micro_batch(s, batch, "c1", {})
        s.execute(
            text("UPDATE micro_batches SET computed_at = claimed_at + make_interval(secs => :took) WHERE id = :id"),
            {"took": took, "id": batch},
        )


def change(s: Session, cell: str, to_role: str, seconds: float | None) -> None:
    row = queries.start_role_change(s, RUN, cell, "train" if to_role == "rollout" else "rollout", to_role, "why")
    if seconds is not None:
        queries.end_role_change(s, row, {})
        s.execute(
            text("UPDATE role_changes SET ended_at = started_at + make_interval(secs => :took) WHERE id = :id"),
            {"took": seconds, "id": row},
        )


def test_a_run_that_has_measured_nothing(engine: Engine) -> None:
    with transaction(engine) as s:
        make_world(s)
        facts = cluster_facts(s, RUN)
    assert (facts.live_rollouts, facts.backlog_tokens, facts.context_tokens, facts.cells) == (4, 0, 0, ())
    assert (facts.train_tokens_s, facts.to_train_s, facts.to_rollout_s, facts.oldest_age_s) == (None,) * 4


def test_speeds_are_medians_so_that_one_restart_does_not_count(engine: Engine) -> None:
    with transaction(engine) as s:
        trained(s, make_world(s, size=6), [4.0, 4.0, 2.0, 4.0, 900.0])
        for seconds in (0.5, 0.7, 80.0):
            change(s, "central", "train", seconds)
        change(s, "central", "rollout", 1.5)
        change(s, "central", "train", None)  # under way: not measured yet
        facts = cluster_facts(s, RUN)
        queries.create_run(s, "other-s0", {}, "other-s0")
        assert cluster_facts(s, "other-s0").train_tokens_s is None, "another run's speed says nothing"
    assert facts.backlog_tokens == 8, "the sixth micro-batch waits"
    assert (facts.train_tokens_s, facts.to_train_s, facts.to_rollout_s) == (2.0, 0.7, 1.5)


def test_a_live_rollout_is_held_by_the_cell_of_its_newest_answer(engine: Engine) -> None:
    with transaction(engine) as s:
        a, b, c, d = make_world(s, size=4).rollouts[0]
        for cell, kv in (("central", 4096), ("satellite", None)):
            queries.upsert_cell(s, RUN, cell, central=cell == "central", role="rollout", max_running=4, routable=True)
            if kv is not None:
                queries.upsert_cell(s, RUN, cell, kv_tokens=kv)
        for rollout, age in ((a, 30.0), (b, 50.0), (c, 10.0)):
            begin(s, rollout, age)
        add_call(s, a, prompt=100, generated=20)
        answered_by(s, a, "central", "satellite")  # moved in the midst of it: its prefix is with the last one
        add_call(s, a, prompt=150, generated=1)  # runs now, on a cell that nobody knows yet
        running = update(Call).where(Call.rollout_id == a, Call.seq == 1)
        s.execute(running.values(status="running", completion_tokens=None))
        add_call(s, b, prompt=40, generated=2)
        answered_by(s, b, "central")
        add_call(s, b, prompt=9000, generated=1, status="refused")  # an overflow holds nothing
        add_call(s, d, prompt=500, generated=5)  # it is settled: its context is nobody's any more
        answered_by(s, d, "central")
        settle(s, d, 1.0)
        facts = cluster_facts(s, RUN)
    assert (facts.live_rollouts, facts.running_rollouts, facts.context_tokens) == (3, 3, 150 + 42)
    assert facts.cells == (CellFacts("central", True, 1, 42, 4096), CellFacts("satellite", True, 1, 150, None))
    assert facts.oldest_age_s is not None and 50 <= facts.oldest_age_s < 200


def test_the_tail_is_that_of_the_oldest_open_step(engine: Engine) -> None:
    with transaction(engine) as s:
        first, second = make_world(s, index=0).rollouts[0], make_world(s, index=1).rollouts[0]
        begin(s, first[0], 5.0)
        begin(s, second[0], 500.0)
        young = cluster_facts(s, RUN).oldest_age_s
        s.execute(text("UPDATE steps SET state = 'done' WHERE index = 0"))
        old = cluster_facts(s, RUN).oldest_age_s
        s.execute(update(Rollout).where(Rollout.id == second[0]).values(state="scoring"))
        assert cluster_facts(s, RUN).oldest_age_s is None, "who is scored calls no model"
    assert young is not None and old is not None and young < 400 < 500 <= old


def test_a_cell_whose_agent_is_silent_serves_nobody(engine: Engine) -> None:
    with transaction(engine) as s:
        make_world(s)
        for name, routable in (("central", True), ("gone", True), ("starting", False)):
            queries.upsert_cell(
                s, RUN, name, central=name == "central", role="rollout", max_running=4, routable=routable
            )
        s.execute(
            text("UPDATE cells SET updated_at = now() - make_interval(secs => :s) WHERE name = 'gone'"),
            {"s": SILENT_S + 5},
        )
        serves = {c.name: c.serves for c in cluster_facts(s, RUN).cells}
    assert serves == {"central": True, "gone": False, "starting": False}
