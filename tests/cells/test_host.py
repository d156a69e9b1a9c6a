"""GYRE_HOST, before anything starts: one line and code 2 where this machine does not have that address."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gyre.config import load_run_config
from tests.settings import worker_settings
from workers.cell_agent import _check_machine
from workers.settings import WorkerSettings

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "run.toml"


def settings(folder: Path, host: str) -> WorkerSettings:
    run = load_run_config(QUICKSTART)
    stack = run.stack.model_copy(update={"listen": "10.0.0.1", "remote_cells": ["satellite"]})
    return worker_settings(
        run.model_copy(update={"stack": stack}), "postgresql+psycopg://x@127.0.0.1:9/x", folder, host=host
    )


@pytest.mark.parametrize(
    ("host", "line"),
    [
        ("ADDRESS", "GYRE_HOST: ADDRESS is no name that this machine knows"),
        ("203.0.113.7", "GYRE_HOST: 203.0.113.7 is no address of this machine; `ip address` shows them"),
        ("127.0.0.1", "GYRE_HOST is 127.0.0.1, which other machines do not reach"),
        ("gpu-2", "GYRE_HOST is gpu-2, here 127.0.1.1, which other machines do not reach"),
    ],
)
def test_what_is_no_address_for_others(
    tmp_path: Path, host: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Debian gives a machine's own name the address 127.0.1.1: it would listen there and be looked for elsewhere."""
    known, real = {"gpu-2": "127.0.1.1"}, socket.gethostbyname
    monkeypatch.setattr(socket, "gethostbyname", lambda name: known.get(name) or real(name))
    with pytest.raises(SystemExit) as ended:
        _check_machine(settings(tmp_path, host), "satellite")
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith(f"gyre: {line}") and said.count("\n") == 1
