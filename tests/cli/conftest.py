"""A data folder whose stack seems to live: its database is the test's own, its supervisor this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Engine

from gyre.cli.main import run_command
from gyre.cli.stackfile import StackState, start_ticks
from tests.report.story import tell

Gyre = Callable[..., tuple[int, str, str]]


@pytest.fixture
def gyre(capsys: pytest.CaptureFixture[str]) -> Gyre:
    """Run `gyre ARGS…` in this process: (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run_command([str(a) for a in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def data(engine: Engine, database: str, tmp_path: Path) -> Path:
    """A data folder with a finished run (tests/report/story.py)."""
    tell(engine)
    me = os.getpid()
    ports = {"ui": 8233, "gateway": 8000}
    StackState(
        state="ready", pid=me, pid_start=start_ticks(me) or 0, ports=ports, database_url=database, run_id="demo-s0"
    ).write(tmp_path)
    return tmp_path
