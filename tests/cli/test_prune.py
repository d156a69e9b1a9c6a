"""`gyre prune` over a finished run: shows first, removes when told, and never what is live or untrained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from gyre.cli.prune import _cut
from gyre.config import RunConfig
from gyre.store import queries
from gyre.store.db import transaction
from tests.cli.conftest import Gyre
from tests.store.world import add_call, make_world, settle

MESSAGES = {"base": 0, "messages": [{"role": "user", "content": "x" * 5000}], "tools": [], "tools_key": ""}


@pytest.fixture
def folders(data: Path, engine: Engine) -> dict[str, Path]:
    """A folder with a file for every rollout: of the story's two steps and evaluations, and of a third step that is
    settled and not trained."""
    with transaction(engine) as s:
        world = make_world(s, size=2, index=2)
        for rollout in world.rollouts[0]:
            add_call(s, rollout)
            settle(s, rollout, 1.0)
        s.execute(text("UPDATE calls SET request = :m"), {"m": json.dumps(MESSAGES)})
        s.execute(text("UPDATE steps SET state = 'done' WHERE index < 2"))
        s.execute(text("UPDATE evaluations SET ended_at = now() WHERE ended_at IS NULL"))
        s.execute(text("UPDATE runs SET config = :c"), {"c": _config()})
        ids = s.scalars(text("SELECT id FROM rollouts")).all()
    found = {}
    for rollout in ids:
        found[rollout] = data / "rollouts" / rollout
        found[rollout].mkdir(parents=True)
        (found[rollout] / "file").write_bytes(b"x" * 9000)
    again = data / "rollouts" / "demo-s0/s0/00/01.a2"
    again.mkdir()
    return {**found, "again": again}


def _config() -> str:
    cells = [{"name": "c", "central": True}]
    made = RunConfig.model_validate(
        {"name": "demo", "steps": 3, "policy": {"path": "p"}, "tasks": {"train": "t"}, "cells": cells}
    )
    return made.model_dump_json()


def test_nothing_goes_unless_something_says_so(gyre: Gyre, data: Path, folders: dict[str, Path]) -> None:
    code, out, _ = gyre("prune", "--yes", "--data", data)
    assert code == 0 and "Nothing says what may go" in out
    code, out, _ = gyre("prune", "--folders", 0, "--requests", 0, "--data", data)
    assert code == 0 and "nothing was removed; --yes removes it" in out
    assert all(f.is_dir() for f in folders.values())
    assert (
        gyre("sql", "SELECT count(*) FROM calls WHERE request ? 'messages'", "--csv", "--data", data)[1]
        == (gyre("sql", "SELECT count(*) FROM calls", "--csv", "--data", data)[1])
    )


def test_folders_of_old_trained_steps_go(gyre: Gyre, data: Path, folders: dict[str, Path]) -> None:
    code, out, err = gyre("prune", "--folders", 1, "--yes", "--data", data)
    assert (code, err) == (0, "")
    gone = {name for name, folder in folders.items() if not folder.exists()}
    expected = {name for name in folders if name.startswith(("demo-s0/s0/", "demo-s0/e0/"))} | {"again"}
    assert gone == expected
    count = int(next(line for line in out.splitlines() if "folders" in line).split()[-2])
    assert count == len(expected)
    gyre("prune", "--folders", 0, "--yes", "--data", data)
    left = {name for name, folder in folders.items() if folder.exists()}
    assert left == {name for name in folders if name.startswith("demo-s0/s2/")}


def test_messages_go_and_all_else_of_a_call_stays(
    gyre: Gyre, data: Path, engine: Engine, folders: dict[str, Path]
) -> None:
    kept = "SELECT id, response, leaf_id, prompt_tokens FROM calls ORDER BY id"
    with engine.connect() as c:
        before = c.execute(text(kept)).all()
    assert gyre("prune", "--requests", 0, "--yes", "--data", data)[0] == 0
    with engine.connect() as c:
        assert c.execute(text(kept)).all() == before
        pruned = "SELECT DISTINCT split_part(rollout_id, '/', 2) FROM calls WHERE request {} 'pruned' ORDER BY 1"
        rows = [
            c.exec_driver_sql(pruned.format(x)).scalars().all() for x in ("?", "- 'messages' = request AND request ?")
        ]
        assert rows[0] == rows[1] and "s2" not in rows[0] and {"s0", "s1"} <= set(rows[0])
        assert (
            c.exec_driver_sql(
                "SELECT count(*) FROM message WHERE rollout_id LIKE 'demo-s0/s2/%%' AND role = 'user'"
            ).scalar()
            == 2
        )
    out = gyre("prune", "--requests", 0, "--data", data)[1]
    assert next(line for line in out.splitlines() if "messages" in line).split()[-2:] == ["0", "0.0"]


def test_cpu_samples_and_logs_by_the_run_file(gyre: Gyre, data: Path, engine: Engine, folders: dict[str, Path]) -> None:
    config = json.loads(_config()) | {"retention": {"cpu_days": 1.0, "log_mb": 1}}
    with transaction(engine) as s:
        s.execute(text("UPDATE runs SET config = :c"), {"c": json.dumps(config)})
        s.execute(text("DELETE FROM cpu_samples"))
        uses = [queries.CpuUse("engine", 1.0), queries.CpuUse("trainer", 1.0)]
        queries.add_cpu_samples(s, "demo-s0", uses)
        s.execute(text("UPDATE cpu_samples SET at = now() - interval '2 days' WHERE component = 'engine'"))
    log = data / "logs" / "gateway.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("".join(f"line {i:06}\n" for i in range(200_000)))
    with log.open("ab") as process:
        assert gyre("prune", "--yes", "--data", data)[0] == 0
        process.write(b"and on\n")
    lines = log.read_text().splitlines()
    assert 900_000 < log.stat().st_size <= 1_000_010
    assert lines[-2:] == ["line 199999", "and on"] and lines[0].startswith("line ")
    with engine.connect() as c:
        assert c.execute(text("SELECT component FROM cpu_samples")).scalars().all() == ["trainer"]
    assert folders["again"].is_dir()


class Busy(type(Path())):  # type: ignore[misc]
    """A log to which its process appends in the moment that its end is copied."""

    def open(self, mode: str = "r", *args: Any, **options: Any) -> Any:
        file = super().open(mode, *args, **options)
        if "+" in mode:
            write = file.write

            def busy(data: bytes) -> int:
                with super(Busy, self).open("ab") as process:
                    process.write(b"meanwhile\n")
                file.write = write
                return int(write(data))

            file.write = busy
        return file


def test_what_a_process_writes_while_its_log_is_cut_stays(tmp_path: Path) -> None:
    log = Busy(tmp_path / "gateway.log")
    log.write_text("".join(f"line {i:03}\n" for i in range(100)))
    _cut(log, 95)
    assert log.read_text().splitlines() == [*(f"line {i:03}" for i in range(90, 100)), "meanwhile"]
