"""A finished run in the database with known numbers: two steps, two cells, held-out before and after."""

from __future__ import annotations

import datetime as dt

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from gyre.store import queries
from gyre.store.db import transaction
from gyre.store.handout import hand_out
from tests.store.world import RUN, add_call, make_world, settle

BEGAN = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
STEP_S = 40.0
REWARDS = ((0.0, 1.0, 0.5, None), (1.0, 1.0, 0.5, 0.0))


def at(seconds: float) -> dt.datetime:
    return BEGAN + dt.timedelta(seconds=seconds)


def tell(engine: Engine) -> str:
    """Write the run and return its id."""
    with transaction(engine) as s:
        for index in range(2):
            _step(s, index)
        for version, rewards in ((0, (0.0, 1.0, 0.0, 0.0)), (2, (1.0, 1.0, 1.0, 0.0))):
            _evaluation(s, version, rewards)
        for cell, central in (("central", True), ("satellite", False)):
            queries.upsert_cell(
                s, RUN, cell, central=central, role="rollout", max_running=16, serving_version=2, routable=True
            )
        for index in range(2):
            for role, begin, end in (("train", 20, 21), ("rollout", 36, 38)):
                change = queries.start_role_change(
                    s, RUN, "central", "rollout" if role == "train" else "train", role, "water is low"
                )
                queries.end_role_change(s, change, {"drain": 0.25})
                _times(s, "role_changes", change, started_at=_in(index, begin), ended_at=_in(index, end))
            used = {"engine": 30.0, "trainer": 8.0, "harness": 6.0, "temporal": 2.0, "postgres": 1.0, "control": 1.0}
            queries.add_cpu_samples(s, RUN, [queries.CpuUse(name, seconds) for name, seconds in used.items()])
            s.execute(text("UPDATE cpu_samples SET at = :at WHERE at > :now"), {"at": _in(index, 30), "now": at(9e6)})
        queries.set_run_state(s, RUN, "done")
        config = '{"steps": 2, "harness": {"name": "mini-swe-agent"}, "scheduling": {"policy": "elastic"}}'
        s.execute(
            text("UPDATE runs SET config = cast(:c AS jsonb), started_at = :a, ended_at = :b"),
            {"c": config, "a": BEGAN, "b": at(100)},
        )
    return RUN


def _in(step: int, seconds: float) -> dt.datetime:
    return at(10 + step * STEP_S + seconds)


def _step(s: Session, index: int) -> None:
    world = make_world(s, groups=1, size=4, index=index)
    for rollout, reward in zip(world.rollouts[0], REWARDS[index], strict=True):
        first = add_call(s, rollout, prompt=50, generated=10, versions=[[index, 0, 10]])
        add_call(s, rollout, first, prompt=20, generated=5, versions=[[index, 0, 5]])
        queries.set_rollout(s, rollout, harness_started_at=_in(index, 1), harness_ended_at=_in(index, 18))
        settle(s, rollout, reward)
        s.execute(
            text("UPDATE rollouts SET created_at = :c, scored_at = :e, settled_at = :e WHERE id = :id"),
            {"c": _in(index, 0), "e": _in(index, 20), "id": rollout},
        )
        status = "no_reward" if reward is None else "ok"
        queries.record_score(s, rollout, 1, status, reward, {}, _in(index, 18))
        s.execute(text("UPDATE scores SET ended_at = :e WHERE rollout_id = :id"), {"e": _in(index, 20), "id": rollout})
        for seq, (a, b, c, d) in enumerate(((2, 3, 4, 8), (10, 10, 11, 16))):
            s.execute(
                text(
                    "UPDATE calls SET started_at = :a, routed_at = :b, first_token_at = :c, ended_at = :d,"
                    " cells = '{central}', finish_reason = 'stop' WHERE rollout_id = :id AND seq = :seq"
                ),
                {"id": rollout, "seq": seq} | {k: _in(index, v) for k, v in zip("abcd", (a, b, c, d), strict=True)},
            )
    hand_out(s, world.group_ids[0], branch_cap=5, micro_batch_tokens=4096, normalize_std=True)
    queries.close_step(s, world.step_id)
    batch = queries.claim_micro_batch(s, world.step_id, "central", "c1")
    assert batch is not None
    metrics = {"mean_abs_logprob_diff": 2e-5, "max_abs_logprob_diff": 1e-4}
    queries.hold_micro_batch(s, batch, "c1", metrics)
    _times(s, "micro_batches", batch, claimed_at=_in(index, 22), computed_at=_in(index, 34))
    queries.finish_step(s, world.step_id, index + 1, {"grad_norm": 1.0}, f"/v{index + 1}", holder="c1")
    queries.set_ticket(s, RUN, index + 1, {})
    _times(
        s, "steps", world.step_id,
        started_at=_in(index, 0), rollouts_done_at=_in(index, 20), trained_at=_in(index, 36),
        published_at=_in(index, 39),
    )  # fmt: skip


def _evaluation(s: Session, version: int, rewards: tuple[float, ...]) -> None:
    evaluation = queries.open_evaluation(s, RUN, version)
    (group,) = queries.create_groups(s, [queries.TaskRef("org/held", "/held", "fix")], evaluation_id=evaluation)
    members = queries.create_rollouts(s, group, len(rewards), temperature=1.0, harness="command")
    for member, reward in zip(members, rewards, strict=True):
        add_call(s, member, generated=7)
        settle(s, member, reward)
    queries.finish_evaluation(s, evaluation)
    begin = 0.0 if version == 0 else 90.0
    _times(s, "evaluations", evaluation, started_at=at(begin), ended_at=at(begin + 9))


def _times(s: Session, table: str, row: int, **times: dt.datetime) -> None:
    assignments = ", ".join(f"{column} = :{column}" for column in times)
    s.execute(text(f"UPDATE {table} SET {assignments} WHERE id = :id"), {**times, "id": row})
