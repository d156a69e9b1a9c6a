"""Verbs that only look, where the environment names the database and nothing has written a `stack.json` (compose)."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Engine

from tests.cli.conftest import Gyre
from tests.report.story import tell
from tests.settings import NOBODY


@pytest.fixture
def container(engine: Engine, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A service's environment, in its own working directory; returns its data folder."""
    tell(engine)
    (tmp_path / "app").mkdir()
    monkeypatch.chdir(tmp_path / "app")
    monkeypatch.setenv("GYRE_DATABASE_URL", database)
    monkeypatch.setenv("GYRE_TEMPORAL_ADDRESS", NOBODY)
    monkeypatch.setenv("GYRE_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_verbs_that_look(gyre: Gyre, container: Path) -> None:
    assert not (container / "stack.json").exists()
    for arguments, says in (
        (["status"], "demo-s0 · done"),
        (["rollouts", "--limit", "3"], "3 of 16 rollouts of demo-s0"),
        (["tree", "demo-s0/s0/00/01"], "2 calls, 85 tokens in the tree"),
        (["sql", "SELECT count(*) AS n FROM runs"], "(1 row)"),
        (["export", container.parent / "out"], f"demo-s0 is in {container.parent / 'out'}"),
        (["report"], str(container / "runs" / "demo-s0" / "report.html")),
    ):
        code, out, err = gyre(*arguments)
        assert (code, err) == (0, ""), arguments
        assert says in out, arguments
    assert NOBODY in gyre("status")[1]
    assert (container / "runs" / "demo-s0" / "report.html").exists()
    code, _, err = gyre("simulate", "--run", "nobody-s0")
    assert code == 1 and "nobody-s0" in err and "stack" not in err


def test_what_changes_the_database_wants_a_stack(gyre: Gyre, container: Path) -> None:
    for arguments in (["prune"], ["import", container.parent], ["status", "--data", container]):
        assert "no stack has run on" in gyre(*arguments)[2], arguments


def test_a_url_that_is_none_is_one_line(gyre: Gyre, container: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("nonsense", "postgresql://gyre@127.0.0.1/gyre"):
        monkeypatch.setenv("GYRE_DATABASE_URL", url)
        code, out, err = gyre("status")
        assert (code, out) == (1, "") and err.startswith("gyre: GYRE_DATABASE_URL: must be postgresql+psycopg://")
