from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine, func, select, text

from gyre.store import queries
from gyre.store.db import transaction
from gyre.store.handout import hand_out
from gyre.store.models import Node
from gyre.store.tokens import pack_ids, pack_logprobs
from tests.store.world import RUN, add_call, make_world, settle

OPTIONS: dict[str, Any] = {"branch_cap": 2, "micro_batch_tokens": 16, "normalize_std": True}
FATES = "SELECT fate, sum(tokens) FROM token_accounting GROUP BY fate"


def test_sql_decodes_what_python_packs(engine: Engine) -> None:
    ids = np.array([0, 1, 255, 256, 65_535, 151_936, 2**31 - 1], np.int32)
    logprobs = np.array([0.0, -0.0, -1.5, -17.25, -1e-30, -1e-42, -np.inf, -0.1], np.float32)
    with engine.connect() as c:
        assert c.scalar(text("SELECT gyre_int32(:b)"), {"b": pack_ids(ids)}) == ids.tolist()
        decoded = c.scalar(text("SELECT gyre_float32(:b)"), {"b": pack_logprobs(logprobs)})
        assert np.array(decoded, np.float32).tobytes() == logprobs.tobytes()
        assert c.scalar(text("SELECT gyre_int32(''::bytea)")) == []


def test_a_path_from_leaf_to_all_its_tokens(engine: Engine) -> None:
    with transaction(engine) as s:
        rollout = make_world(s).rollouts[0][0]
        shared = add_call(s, rollout)
        leaf = add_call(s, rollout, shared)
        add_call(s, rollout, shared)
        kinds = s.scalars(text("SELECT kind FROM path_nodes(:leaf)"), {"leaf": leaf.id}).all()
        assert kinds == ["prompt", "generated", "prompt", "generated"]
        path = s.scalar(text("SELECT path_tokens(:leaf)"), {"leaf": leaf.id})
        assert path == [*range(8), *range(1008, 1016)]
        assert s.scalar(text("SELECT tokens(:leaf)"), {"leaf": leaf.id}) == [1013, 1014, 1015]
        assert s.scalar(text("SELECT logprobs(:leaf)"), {"leaf": leaf.id}) == [0.0, -0.125, -0.25]


def test_phases_of_role_changes_with_what_they_free(engine: Engine) -> None:
    with transaction(engine) as s:
        queries.create_run(s, RUN, {}, RUN)
        done = queries.start_role_change(s, RUN, "sat", "rollout", "train", "backlog")
        memory = {
            "before": {"engine": 900.0, "trainer": 400.0},
            "drain": {"engine": 890.0, "trainer": 400.0},
            "load": {"engine": 500.0, "trainer": 460.0},
            "release": {"engine": 500.0, "trainer": 400.0},
        }
        queries.end_role_change(s, done, {"drain": 0.5, "release": 0.25, "load": 0.125}, memory)
        bare = queries.start_role_change(s, RUN, "sat", "train", "rollout", "level")
        queries.end_role_change(s, bare, {"push": 1.0})  # by an agent that measured no memory
        queries.start_role_change(s, RUN, "sat", "rollout", "train", "it is on its way")
        rows = s.execute(
            text(
                "SELECT phase, seconds, engine_mb, engine_freed_mb, trainer_freed_mb FROM role_change_phase"
                " WHERE change_id = :c AND phase <> 'all' ORDER BY place"
            ),
            {"c": done},
        )
        assert [tuple(row) for row in rows] == [
            ("drain", 0.5, 890.0, 10.0, 0.0),
            ("release", 0.25, 500.0, 390.0, 0.0),
            ("load", 0.125, 500.0, 0.0, -60.0),
        ]
        whole = s.execute(text("SELECT * FROM role_change_phase WHERE phase = 'all' ORDER BY change_id")).all()
        assert [(row.change_id, row.engine_freed_mb, row.trainer_freed_mb) for row in whole] == [
            (done, 400.0, -60.0),
            (bare, None, None),
        ]
        assert s.scalar(text("SELECT count(*) FROM role_change_phase WHERE change_id = :c"), {"c": bare}) == 2


def test_the_branch_view_shows_the_processors_branches(engine: Engine) -> None:
    with transaction(engine) as s:
        world = make_world(s, size=2)
        a, b = world.rollouts[0]
        main = add_call(s, a, add_call(s, a))
        add_call(s, a, main, kind="auxiliary")
        add_call(s, a, main, status="incomplete")
        summary = add_call(s, a, add_call(s, a, main), kind="main-summary")
        agent = add_call(s, a, kind="sub-agent", generated=9)
        title = add_call(s, a, kind="auxiliary")
        under_title = add_call(s, a, title)
        other = add_call(s, b)
        settle(s, a, 1.0)
        settle(s, b, 0.0)
        hand_out(s, world.group_ids[0], **{**OPTIONS, "branch_cap": 9})
        tree = queries.trees(s, [a])[a]
        shown = s.execute(text("SELECT * FROM branch WHERE rollout_id = :r"), {"r": a}).all()
        trained = {row.leaf_id: row for row in shown if row.kind != "auxiliary"}
        assert trained.keys() == {x.leaf_id for x in tree.branches()} == {summary.id, agent.id, under_title.id}
        for branch in tree.branches():
            row = trained[branch.leaf_id]
            assert row.nodes == [n.id for n in branch.nodes]
            assert (row.kind, row.n_tokens) == (branch.kind, branch.n_tokens)
            assert row.n_generated == sum(n.length for n in branch.nodes if n.generated)
            assert row.n_targets is not None and row.rank is not None
        assert next(r for r in shown if r.kind == "auxiliary").rank is None
        assert len(shown) == 4
        assert s.scalars(text("SELECT leaf_id FROM branch WHERE rollout_id = :r"), {"r": b}).all() == [other.id]


def test_every_sampled_token_has_one_fate(engine: Engine) -> None:
    with transaction(engine) as s:
        queries.create_run(s, RUN, {}, RUN)
        world = make_world(s, groups=4)
        mixed, equal, few, still = world.rollouts
        # A group that is trained: three main branches under a cap of two, a title, an abandoned call, one excluded.
        root = add_call(s, mixed[0], generated=10)
        for generated in (7, 5, 3):
            add_call(s, mixed[0], root, generated=generated)
        add_call(s, mixed[0], kind="auxiliary", generated=2)
        add_call(s, mixed[0], root, status="incomplete", generated=4)
        for rollout in mixed[1:]:
            add_call(s, rollout, generated=6)
        for rollout, reward in zip(mixed, (1.0, 0.0, None, 0.5), strict=True):
            settle(s, rollout, reward)
        for rollout in equal:
            add_call(s, rollout, generated=1)
            settle(s, rollout, 0.0)
        for i, rollout in enumerate(few):
            add_call(s, rollout, generated=1)
            settle(s, rollout, 1.0 if i == 0 else None)
        add_call(s, still[0], generated=8)
        add_call(s, still[1], generated=8)
        settle(s, still[1], 1.0)
        # A call that broke off before a node was written: its tokens are counted by the call.
        lost = add_call(s, still[0], status="incomplete", generated=11)
        call = lost.call_id
        s.execute(text("UPDATE calls SET leaf_id = NULL WHERE id = :c"), {"c": call})
        s.execute(text("DELETE FROM nodes WHERE call_id = :c AND kind = 'generated'"), {"c": call})
        for group in world.group_ids[:3]:
            hand_out(s, group, **OPTIONS)
        evaluation = queries.open_evaluation(s, RUN, 0)
        (held_out,) = queries.create_groups(s, [queries.TaskRef("o/t", "/t")], evaluation_id=evaluation)
        for rollout in queries.create_rollouts(s, held_out, 2, temperature=1.0, harness="command"):
            add_call(s, rollout, generated=13)

    def fates() -> Counter[str]:
        with transaction(engine) as s:
            return Counter({fate: int(n) for fate, n in s.execute(text(FATES))})

    expected = {
        "queued": 10 + 7 + 5 + 6 + 6,
        "not_kept": 3,
        "auxiliary": 2,
        "incomplete": 4 + 11,
        "excluded_evaluator": 6 + 3,
        "no_variance": 4,
        "too_few_valid": 1,
        "open": 16,
        "evaluation": 26,
    }
    assert fates() == expected
    with transaction(engine) as s:
        first = queries.claim_micro_batch(s, world.step_id, "c", "c1") or 0
        queries.hold_micro_batch(s, first, "c1", {})
        part = queries.micro_batch_row(s, first).n_targets
    assert (fates()["trained"], fates()["queued"]) == (part, 34 - part)
    with transaction(engine) as s:
        while (found := queries.claim_micro_batch(s, world.step_id, "c", "c1")) is not None:
            queries.hold_micro_batch(s, found, "c1", {"mean_abs_logprob_diff": 1e-4})
    done = fates()
    assert (done["trained"], done["queued"]) == (34, 0)
    with transaction(engine) as s:
        nodes = s.scalar(select(func.sum(Node.length)).where(Node.kind == "generated"))
        assert sum(done.values()) == nodes + 11
        assert s.scalar(text("SELECT count(*) FROM token_accounting")) == s.scalar(
            text("SELECT count(DISTINCT (call_id, node_id)) FROM token_accounting")
        )


def test_summaries(engine: Engine) -> None:
    with transaction(engine) as s:
        world = make_world(s, groups=2)
        for group in world.rollouts:
            for i, rollout in enumerate(group):
                first = add_call(s, rollout, versions=[[2, 0, 1], [3, 1, 3]])
                add_call(s, rollout, first, versions=[[3, 0, 3]])
                settle(s, rollout, None if i == 3 else float(i == 0))
        for group_id in world.group_ids:
            hand_out(s, group_id, **OPTIONS)
        queries.close_step(s, world.step_id)
        for i, diff in enumerate((1e-4, 3e-4)):
            found = queries.claim_micro_batch(s, world.step_id, "c", "c") or 0
            metrics = {"mean_abs_logprob_diff": diff, "max_abs_logprob_diff": diff * (i + 2)}
            queries.hold_micro_batch(s, found, "c", metrics)
        step = s.execute(text("SELECT * FROM step_summary WHERE run_id = :r"), {"r": RUN}).one()
        rollout = s.execute(text("SELECT * FROM rollout_summary WHERE position = 1 AND member = 0")).one()
    assert (step.groups, step.groups_trained, step.rollouts, step.valid, step.excluded) == (2, 2, 8, 6, 2)
    assert (step.mean_reward, step.success) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert (step.calls, step.sampled_tokens, step.n_valid) == (16, 48, 6)
    assert (step.micro_batches, step.micro_batches_waiting, step.trained_targets) == (6, 4, 12)
    assert step.logprob_diff == pytest.approx(2e-4)
    assert step.logprob_diff_max == pytest.approx(9e-4)
    assert (rollout.task, rollout.step, rollout.reward, rollout.family) == ("org/task-1", 0, 1.0, "fix")
    assert (rollout.calls, rollout.complete_calls, rollout.forks, rollout.sampled_tokens) == (2, 2, 0, 6)
    assert (rollout.oldest_version, rollout.newest_version) == (2, 3)
    assert (rollout.samples, rollout.targets, rollout.tree_tokens) == (1, 6, 16)
