"""An agent whose cell another one has taken, where whatever ends is started again: it stays, and does nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from sqlalchemy import Engine

from gyre.config import RunConfig
from gyre.store import queries as q
from gyre.store.db import transaction
from tests.settings import worker_settings


def until(true: Callable[[], bool], log: Path, limit_s: float = 300) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, f"did not come true; {log.read_text()[-3000:]}"
        time.sleep(0.1)


def test_it_sleeps_without_engine_and_trainer(run: RunConfig, engine: Engine, database: str, tmp_path: Path) -> None:
    settings = worker_settings(run, database, tmp_path)
    argv, log = [sys.executable, "-m", "workers.cell_agent", "--cell", "c0", "--stay"], tmp_path / "agent.log"
    with log.open("wb") as output:
        agent = subprocess.Popen(argv, env={**os.environ, **settings.to_env()}, stdout=output, stderr=output)
    process = psutil.Process(agent.pid)

    def epoch() -> int:
        with transaction(engine) as session:
            return q.cell_epoch(session, run.run_id, "c0")

    try:
        until(lambda: epoch() == 1 and bool(process.children(recursive=True)), log)
        with transaction(engine) as session:
            q.take_cell(session, run.run_id, "c0", central=True, max_running=8)
        until(lambda: process.cmdline() == ["sleep", "infinity"], log)
        left = [child.name() for child in process.children(recursive=True)]
        assert set(left) <= {"torch_shm_manager"}, "no engine and no trainer"
        assert "'c0' of run 'cells-s0' was taken by another agent (epoch 2)" in log.read_text()
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(120) == -signal.SIGTERM
        assert epoch() == 2
    finally:
        agent.kill()
        agent.wait()
