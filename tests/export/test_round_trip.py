"""What is exported and imported again is the same run, row for row; and what is wrong is said in one line."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from atif import Trajectory
from sqlalchemy import Connection, Engine, bindparam, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Session

from gyre.export import ExportError, Scope, export_atif, export_parquet, import_atif, import_parquet
from gyre.export.rows import TABLES, columns
from gyre.store import queries
from gyre.store.call_writer import CallWriter
from gyre.store.db import transaction
from gyre.store.gateway_queries import CallWrite, NodeSplit
from gyre.store.handout import hand_out
from gyre.store.models import Call
from gyre.store.vocabulary import load_vocabulary
from tests.store.test_content import POLICY
from tests.store.world import RUN, World, add_call, make_world, settle


@pytest.fixture
def world(engine: Engine, database: str) -> World:
    """Two steps: one handed out, with forks, a split prompt, a sub-agent and a broken-off call; one still open."""
    with transaction(engine) as s:
        world = make_world(s, groups=2, size=3)
        make_world(s, size=2, index=1)
        load_vocabulary(s, RUN, POLICY)
        for group in world.rollouts:
            for rollout, reward in zip(group, (1.0, 0.0, None), strict=True):
                first = add_call(s, rollout, prompt=9, versions=[[0, 0, 1], [1, 1, 3]])
                second = add_call(s, rollout, first)
                add_call(s, rollout, second)
                add_call(s, rollout, first, kind="sub-agent")
                add_call(s, rollout, second, status="incomplete")
                add_call(s, rollout, kind="main")
                queries.record_score(
                    s, rollout, 1, "error" if reward is None else "ok", reward, {"rewards": {"reward": reward}},
                    started_at=dt.datetime.now(dt.UTC),
                )  # fmt: skip
                settle(s, rollout, reward)
        calls = s.query(Call).order_by(Call.rollout_id, Call.seq).all()
        for call, parent in zip(calls[1::6], calls[::6], strict=True):
            call.parent_call_id = parent.id
        tool = {"id": "t1", "name": "Bash", "arguments": '{"command": "ls"}'}
        for call in calls:
            asked = {"role": "user", "content": [{"type": "text", "text": "größe?"}]}
            result = {"role": "tool", "tool_call_id": "t1", "content": "a.py"}
            call.request = {"base": 0, "messages": [asked] if call.parent_call_id is None else [result]}
            call.response = {
                "content": "ich \u2028 sehe",
                "reasoning": "hm",
                "tool_calls": [tool, tool | {"arguments": "{"}],
            }
            call.ended_at = dt.datetime.now(dt.UTC)
        hand_out(s, world.group_ids[0], branch_cap=2, micro_batch_tokens=64, normalize_std=True)
        _train_one(s, world.step_id)
        root = s.scalar(text("SELECT id FROM nodes WHERE start = 0 ORDER BY id LIMIT 1"))
        length = s.scalar(text("SELECT length FROM nodes WHERE id = :n"), {"n": root})
        fresh = s.scalar(text("SELECT nextval('nodes_id_seq')"))
        call_id = calls[0].id
    asyncio.run(_split(database, CallWrite(call_id, splits=[NodeSplit(root, fresh, 4, 0, length)])))
    return world


def _train_one(s: Session, step_id: int) -> None:
    """A micro-batch of which the mask took one token of each node."""
    batch = queries.claim_micro_batch(s, step_id, "central", "c1")
    assert batch is not None
    nodes = s.scalars(text("SELECT unnest(owned_nodes) FROM samples WHERE micro_batch_id = :m"), {"m": batch}).all()
    metrics = {"rejected_targets": len(nodes), "rejected_by_node": {str(n): 1 for n in nodes}, "mean_ratio": 1.5}
    assert queries.hold_micro_batch(s, batch, "c1", metrics)


async def _split(database: str, write: CallWrite) -> None:
    writer = CallWriter(database)
    await writer.write([write])
    await writer.close()


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.begin() as c:
        yield c


def content(c: Connection, run: str, tables: list[str]) -> dict[str, list[dict[str, Any]]]:
    """All exported columns of a run; ids by their rank within the table, the run's name and its state left out."""
    found: dict[str, list[dict[str, Any]]] = {}
    rank: dict[str, dict[Any, int]] = {}
    reach = {
        "runs": "id = :run", "steps": "run_id = :run", "evaluations": "run_id = :run", "groups": "run_id = :run",
        "rollouts": "run_id = :run",
        "micro_batches": "step_id IN (SELECT id FROM steps WHERE run_id = :run)",
        "token_pieces": "true",
    }  # fmt: skip
    for table in TABLES:
        where = reach.get(table, "rollout_id IN (SELECT id FROM rollouts WHERE run_id = :run)")
        names = ", ".join(f'"{n}"' for n in columns(table))
        key = next(iter(TABLES[table].primary_key)).name
        rows = c.execute(text(f"SELECT {names} FROM {table} WHERE {where} ORDER BY {key}"), {"run": run}).mappings()
        found[table] = [dict(r) for r in rows]
        rank[table] = {r["id"]: i for i, r in enumerate(found[table])}
    for table, rows in found.items():
        for row in rows:
            if table != "token_pieces":
                row["id"] = rank[table][row["id"]]
            for column in TABLES[table].columns:
                for fk in column.foreign_keys:
                    if row.get(column.name) is not None and column.name in row:
                        row[column.name] = rank[fk.column.table.name][row[column.name]]
            if table == "samples":
                row["owned_nodes"] = [rank["nodes"][n] for n in row["owned_nodes"]]
            if by := row.get("metrics", {}).get("rejected_by_node"):
                row["metrics"] = row["metrics"] | {"rejected_by_node": {rank["nodes"][int(n)]: by[n] for n in by}}
            if table == "runs":
                del row["state"]
    return {table: found[table] for table in tables}


VIEWS = """
    SELECT 'rollout', member::text, reward, sampled_tokens::float8 FROM rollout_summary WHERE run_id = :run UNION ALL
    SELECT 'branch', kind, n_tokens, n_targets FROM branch WHERE run_id = :run UNION ALL
    SELECT 'fate', fate, tokens, step FROM token_accounting WHERE run_id = :run UNION ALL
    SELECT 'text', path_text(leaf_id), 0, 0 FROM branch WHERE run_id = :run ORDER BY 1, 2, 3, 4
"""


def test_parquet_gives_back_the_run(connection: Connection, world: World, tmp_path: Path) -> None:
    counts = export_parquet(connection, Scope(RUN), tmp_path / "run")
    assert counts["rollouts"] == 8 and counts["samples"] > 2
    name, imported = import_parquet(connection, tmp_path / "run", "again")
    assert (name, imported) == ("again", counts)
    assert content(connection, "again", list(TABLES)) == content(connection, RUN, list(TABLES))
    rows = [connection.execute(text(VIEWS), {"run": run}).all() for run in (RUN, "again")]
    assert rows[0] == rows[1] and len(rows[0]) > 20
    assert {r[1] for r in rows[0] if r[0] == "fate"} >= {"trained", "rejected"}
    state = "SELECT state FROM runs WHERE id = 'again'"
    assert connection.scalar(text(state)) == "archived"
    secret = "SELECT count(DISTINCT token), count(*) FROM rollouts"
    assert connection.execute(text(secret)).one() == (16, 16)


def test_parquet_holds_numbers(connection: Connection, world: World, tmp_path: Path) -> None:
    export_parquet(connection, Scope(RUN), tmp_path / "run")
    nodes = pq.read_table(tmp_path / "run" / "nodes.parquet").to_pylist()
    for node in nodes[:6]:
        assert node["token_ids"] == connection.scalar(text(f"SELECT tokens({node['id']})"))
        logprobs = connection.scalar(text(f"SELECT logprobs({node['id']})"))
        assert (node["logprobs"] is None) == (logprobs is None)
        assert logprobs is None or np.array_equal(np.float32(node["logprobs"]), np.float32(logprobs))
    assert "token" not in pq.read_schema(tmp_path / "run" / "rollouts.parquet").names


@pytest.mark.parametrize("prompt_ids", [False, True])
def test_atif_gives_back_the_rollouts(connection: Connection, world: World, tmp_path: Path, prompt_ids: bool) -> None:
    files = export_atif(connection, Scope(RUN, step=0), tmp_path / "run", prompt_ids=prompt_ids)
    assert len(files) == 6
    import_atif(connection, tmp_path / "run", "again")
    tables = ["groups", "rollouts", "scores", "micro_batches", "calls", "nodes", "samples"]
    there = content(connection, "again", tables)
    here = content(connection, RUN, tables)
    # The step that is open has no call, so it is in no file.
    here["groups"], here["rollouts"] = here["groups"][:2], here["rollouts"][:6]
    assert there == here


def test_atif_says_what_was_said(connection: Connection, world: World, tmp_path: Path) -> None:
    rollout = world.rollouts[0][0]
    [file] = export_atif(connection, Scope(RUN, rollout=rollout), tmp_path / "one", prompt_ids=True)
    document = Trajectory.model_validate_json(file.read_bytes())
    assert (document.schema_version, document.session_id) == ("ATIF-v1.8", rollout)
    parts = [document, *(document.subagent_trajectories or [])]
    calls = connection.execute(
        text("SELECT seq, leaf_id, path_tokens(leaf_id) AS path, tokens(leaf_id) AS ids, logprobs(leaf_id) AS logprobs"
             " FROM calls WHERE rollout_id = :r"), {"r": rollout},
    ).all()  # fmt: skip
    sampled = {s.extra["call"]: s.metrics for p in parts for s in p.steps if s.metrics and s.extra}
    assert sampled.keys() == {c.seq for c in calls}
    for call in calls:
        metrics = sampled[call.seq]
        assert metrics is not None and metrics.prompt_token_ids is not None
        assert metrics.completion_token_ids == call.ids and metrics.logprobs == call.logprobs
        assert [*metrics.prompt_token_ids, *call.ids] == call.path
    first = document.steps
    assert [s.source for s in first] == ["user", "agent", "agent"]
    assert first[0].message == "größe?"
    assert first[1].reasoning_content == "hm" and first[1].tool_calls is not None
    assert first[1].tool_calls[0].arguments == {"command": "ls"}
    assert first[1].tool_calls[1].extra == {"arguments": "{"}
    assert first[1].observation is not None and first[1].observation.results[0].source_call_id == "t1"
    assert document.continued_trajectory_ref is not None
    assert document.continued_trajectory_ref.split("#")[1] in {p.trajectory_id for p in parts[1:]}


def test_steps_that_branches_share_are_copies(connection: Connection, world: World, tmp_path: Path) -> None:
    rollout = world.rollouts[0][0]
    first = "(SELECT id FROM calls WHERE rollout_id = :r AND seq = 0)"
    later = "UPDATE calls SET parent_call_id = {} WHERE rollout_id = :r AND seq IN (2, 3)"
    connection.execute(text(later.format(first)), {"r": rollout})
    [file] = export_atif(connection, Scope(RUN, rollout=rollout), tmp_path / "one")
    document = Trajectory.model_validate_json(file.read_bytes())
    parts = [document, *(document.subagent_trajectories or [])]
    copied = [[bool(s.is_copied_context) for s in p.steps if s.extra and s.extra["call"] == 0] for p in parts]
    assert sorted(x for part in copied for x in part) == [False, True, True]
    assert copied[0] == [False]


def test_the_harness_environment_stays_at_home(connection: Connection, world: World, tmp_path: Path) -> None:
    config = {"name": "demo", "harness": {"name": "command", "env": {"API_KEY": "sk-very-secret", "LANG": "C"}}}
    connection.execute(text("UPDATE runs SET config = :c").bindparams(bindparam("c", type_=JSONB)), {"c": config})
    export_parquet(connection, Scope(RUN), tmp_path / "run")
    [row] = pq.read_table(tmp_path / "run" / "runs.parquet").to_pylist()
    hidden = {"name": "demo", "harness": {"name": "command", "env": {"API_KEY": "***", "LANG": "***"}}}
    assert json.loads(row["config"]) == hidden
    for file in export_atif(connection, Scope(RUN, step=0), tmp_path / "atif"):
        assert "sk-very-secret" not in file.read_text()
    import_parquet(connection, tmp_path / "run", "again")
    assert connection.scalar(text("SELECT config FROM runs WHERE id = 'again'")) == hidden
    assert connection.scalar(text("SELECT config FROM runs WHERE id = :r"), {"r": RUN}) == config


def test_one_step_and_one_rollout(connection: Connection, world: World, tmp_path: Path) -> None:
    assert export_parquet(connection, Scope(RUN, step=0), tmp_path / "step")["rollouts"] == 6
    counts = export_parquet(connection, Scope(RUN, rollout=world.rollouts[0][1]), tmp_path / "one")
    assert (counts["rollouts"], counts["groups"], counts["steps"], counts["calls"]) == (1, 1, 1, 6)
    _, imported = import_parquet(connection, tmp_path / "one", "one")
    assert imported == counts
    with pytest.raises(ExportError, match="step 7: run demo-s0 has none"):
        export_parquet(connection, Scope(RUN, step=7), tmp_path / "none")
    with pytest.raises(ExportError, match="no run 'other'"):
        export_atif(connection, Scope("other"), tmp_path / "none")


def test_a_part_of_a_run_names_only_nodes_that_came_along(connection: Connection, world: World, tmp_path: Path) -> None:
    fates = text("SELECT fate, tokens FROM token_accounting WHERE rollout_id = :r ORDER BY 1, 2")
    named = text("SELECT jsonb_object_keys(m.metrics -> 'rejected_by_node')::bigint FROM micro_batches m"
                 " JOIN steps s ON s.id = m.step_id WHERE s.run_id = :r")  # fmt: skip
    shared = text("SELECT rollout_id FROM samples WHERE micro_batch_id = :m ORDER BY 1 LIMIT 1")
    held = connection.scalar(text("SELECT id FROM micro_batches WHERE state = 'held'"))
    rollout = connection.scalar(shared, {"m": held})
    # As if another rollout's node had been in the same micro-batch.
    other = connection.scalar(text("SELECT max(id) FROM nodes WHERE rollout_id <> :r"), {"r": rollout})
    add = "UPDATE micro_batches SET metrics = jsonb_set(metrics, :at, '1') WHERE id = :m"
    connection.execute(text(add), {"at": ["rejected_by_node", str(other)], "m": held})
    export_parquet(connection, Scope(RUN, rollout=rollout), tmp_path / "one")
    import_parquet(connection, tmp_path / "one", "one")
    here, there = (connection.execute(fates, {"r": r}).all() for r in (rollout, str(rollout).replace(RUN, "one")))
    assert here == there and "rejected" in {fate for fate, _ in here}
    mine = connection.scalars(text("SELECT id FROM nodes WHERE rollout_id LIKE 'one/%'")).all()
    names = connection.scalars(named, {"r": "one"}).all()
    assert names and set(names) <= set(mine)


def test_what_cannot_be_imported(connection: Connection, world: World, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    export_parquet(connection, Scope(RUN), folder)
    with pytest.raises(ExportError, match="is not empty"):
        export_parquet(connection, Scope(RUN), folder)
    with pytest.raises(ExportError, match="run demo-s0 is in this database already; give it another name with --as"):
        import_parquet(connection, folder)
    (folder / "samples.parquet").unlink()
    with pytest.raises(ExportError, match=r"samples\.parquet is missing"):
        import_parquet(connection, folder, "x1")
    [file, *_] = export_atif(connection, Scope(RUN, step=0), tmp_path / "atif")
    document = json.loads(file.read_bytes())
    document["steps"][0]["step_id"] = 5
    (tmp_path / "broken.json").write_text(json.dumps(document))
    with pytest.raises(ExportError, match=r"broken\.json: .*step_id"):
        import_atif(connection, tmp_path / "broken.json", "x2")
    document = json.loads(file.read_bytes())
    del document["extra"]["gyre"]
    (tmp_path / "foreign.json").write_text(json.dumps(document))
    with pytest.raises(ExportError, match=r"foreign\.json: no rows of Gyre in it"):
        import_atif(connection, tmp_path / "foreign.json", "x3")


def test_an_imported_run_is_not_trained(engine: Engine, world: World, tmp_path: Path) -> None:
    with engine.begin() as c:
        export_parquet(c, Scope(RUN), tmp_path / "run")
        import_parquet(c, tmp_path / "run", "again")
    with pytest.raises(ValueError, match="run again is an import"), transaction(engine) as s:
        queries.set_run_state(s, "again", "running")
