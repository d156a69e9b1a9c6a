from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from gyre.store import queries, report
from gyre.store.db import transaction
from gyre.store.handout import hand_out
from gyre.store.wall_time import Span, attribute, by_window
from tests.store.world import RUN, add_call, make_world, settle

BEGAN = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def at(seconds: float) -> dt.datetime:
    return BEGAN + dt.timedelta(seconds=seconds)


MOMENTS = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted)


@given(st.lists(MOMENTS, max_size=20), st.lists(MOMENTS, max_size=6))
def test_each_window_gets_the_spans_that_reach_into_it(moments: list[list[int]], bounds: list[list[int]]) -> None:
    spans = [Span("decode", a, b) for a, b in moments]
    windows = sorted((float(a), float(b)) for a, b in bounds)
    for (began, ended), found in zip(windows, by_window(spans, windows), strict=True):
        assert found == [s for s in spans if s.began < ended and s.ended > began]
        assert attribute(found, began, ended) == attribute(spans, began, ended)


def test_an_instant_is_divided_among_what_goes_on() -> None:
    spans = [Span("decode", 0, 4), Span("decode", 1, 3), Span("training", 2, 6), Span("scoring", 8, 99)]
    assert attribute(spans, 0, 10) == {"decode": 3.0, "training": 3.0, "orchestration": 2.0, "scoring": 2.0}
    assert attribute([], 1, 3) == {"orchestration": 2}
    assert attribute(spans, 5, 5) == {}
    with pytest.raises(ValueError, match="before it begins"):
        attribute(spans, 5, 4)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-5, 25), st.integers(-5, 25)), max_size=12))
def test_the_parts_are_the_whole(raw: list[tuple[str, int, int]]) -> None:
    parts = attribute([Span(name, began, ended) for name, began, ended in raw], 0, 20)
    assert sum(parts.values()) == pytest.approx(20)
    assert min(parts.values()) > 0


def test_a_run_is_told(engine: Engine) -> None:
    with transaction(engine) as s:
        world = make_world(s, groups=1, size=2)
        for i, rollout in enumerate(world.rollouts[0]):
            first = add_call(s, rollout)
            add_call(s, rollout, first)
            queries.set_rollout(s, rollout, harness_started_at=at(1), harness_ended_at=at(9), scored_at=at(10))
            queries.record_score(s, rollout, 1, "ok", float(i), {}, at(9))
            settle(s, rollout, float(i))
        hand_out(s, world.group_ids[0], branch_cap=5, micro_batch_tokens=64, normalize_std=True)
        queries.close_step(s, world.step_id)
        found = queries.claim_micro_batch(s, world.step_id, "central", "c1") or 0
        queries.hold_micro_batch(s, found, "c1", {})
        queries.finish_step(s, world.step_id, 1, {"grad_norm": 1.0}, "/v1", holder="c1")
        queries.set_ticket(s, RUN, 1, {})
        queries.upsert_cell(s, RUN, "central", central=True, role="rollout", max_running=4)
        queries.upsert_cell(s, RUN, "sat", central=False, role="rollout", max_running=4)
        change = queries.start_role_change(s, RUN, "central", "rollout", "train", "backlog")
        queries.end_role_change(s, change, {"drain": 0.5})
        queries.add_cpu_samples(s, RUN, [queries.CpuUse("engine", 2.0, "sat"), queries.CpuUse("postgres", 0.5)] * 2)
        queries.set_run_state(s, RUN, "done")
        # Real times are those of this test; a known minute is easier to judge.
        for statement, values in (
            (
                "UPDATE calls SET started_at = :a, routed_at = :b, first_token_at = :c, ended_at = :d WHERE seq = 0",
                (1, 2, 3, 4),
            ),
            (
                "UPDATE calls SET started_at = :a, routed_at = :b, first_token_at = :c, ended_at = :d WHERE seq = 1",
                (5, 5, 6, 8),
            ),
            ("UPDATE micro_batches SET claimed_at = :a, computed_at = :b", (11, 14, 0, 0)),
            (
                "UPDATE steps SET started_at = :a, trained_at = :b, published_at = :c, rollouts_done_at = :d",
                (0, 16, 17, 15),
            ),
            ("UPDATE role_changes SET started_at = :a, ended_at = :b", (10, 11, 0, 0)),
            ("UPDATE scores SET started_at = :a, ended_at = :b", (9, 10, 0, 0)),
            ("UPDATE runs SET started_at = :a, ended_at = :b", (0, 20, 0, 0)),
        ):
            bound = dict(zip("abcd", map(at, values), strict=True))
            s.execute(text(statement), {k: v for k, v in bound.items() if f":{k}" in statement})
    with transaction(engine) as s:
        (step,) = report.steps(s, RUN)
        (time,) = report.step_times(s, RUN)
        spans = report.role_spans(s, RUN)
        fates = report.token_fates(s, RUN)
        cpu = report.cpu_use(s, RUN)
        forks = report.fork_reasons(s, RUN)
    assert (step.step, step.mean_reward, step.trained_targets, step.metrics) == (0, 0.5, 12, {"grad_norm": 1.0})
    assert time.seconds == pytest.approx(17)
    assert time.parts == {
        "orchestration": pytest.approx(1 + 1),  # before the harness starts, and until the last group is handed out
        "optimizer step": pytest.approx(1),
        "waiting for a cell": pytest.approx(1),
        "prefill": pytest.approx(1 + 1),
        "decode": pytest.approx(1 + 2),
        "harness and tools": pytest.approx(1 + 1),
        "scoring": pytest.approx(1),
        "role switch": pytest.approx(1),
        "training": pytest.approx(3),
        "weights": pytest.approx(1),
    }
    assert [(x.cell, x.role, x.started_at, x.ended_at) for x in spans] == [
        ("central", "rollout", at(0), at(10)),
        ("central", "to_train", at(10), at(11)),
        ("central", "train", at(11), at(20)),
        ("sat", "rollout", at(0), at(20)),
    ]
    assert [(f.step, f.fate, f.tokens) for f in fates] == [(0, "trained", 12)]
    assert [(c.component, c.cell, c.cpu_s) for c in cpu] == [("engine", "sat", 4.0), ("postgres", None, 1.0)]
    assert forks == {"root": 2}


def test_held_out_results_by_family(engine: Engine) -> None:
    with transaction(engine) as s:
        queries.create_run(s, RUN, {}, RUN)
        evaluation = queries.open_evaluation(s, RUN, 0)
        tasks = [queries.TaskRef("o/a", "/a", "fix"), queries.TaskRef("o/b", "/b", "rename")]
        for group, rewards in zip(
            queries.create_groups(s, tasks, evaluation_id=evaluation), ((1.0, 0.5), (0.0, None)), strict=True
        ):
            members = queries.create_rollouts(s, group, 2, temperature=1.0, harness="command")
            for member, reward in zip(members, rewards, strict=True):
                add_call(s, member)
                settle(s, member, reward)
        found = report.evaluation_results(s, RUN)
    assert [(f.version, f.family, f.success, f.mean_reward, f.n_valid) for f in found] == [
        (0, None, pytest.approx(1 / 3), 0.5, 3),
        (0, "fix", 0.5, 0.75, 2),
        (0, "rename", 0.0, 0.0, 1),
    ]
