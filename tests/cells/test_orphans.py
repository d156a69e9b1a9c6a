"""kill -9 of an agent whose trainer has several ranks: no process of the cell is left, on any of its machines.

Its server starts at once and answers nothing; that SGLang ends with its agent is test_agent.py's business.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import Engine

from activities.cell_trainer import trainer_socket
from gyre.config import RunConfig
from gyre.ports import free_port
from gyre.store import queries as q
from gyre.store.db import transaction
from gyre.training.launch import trainer_command
from tests.settings import worker_settings
from workers.settings import WorkerSettings

ONE_MACHINE = {"layout": {"tensor_parallel": 2}}
TWO_MACHINES = {"layout": {"tensor_parallel": 2}, "nodes": ["127.0.0.1", "localhost"], "devices": [0]}
AGENT = [sys.executable, "-m", "tests.cells.quiet_agent", "--cell", "c0"]


@pytest.mark.parametrize("cell", [ONE_MACHINE, TWO_MACHINES], ids=["one machine", "torchrun"])
def test_no_rank_outlives_its_agent(
    run: RunConfig, engine: Engine, database: str, tmp_path: Path, cell: dict[str, Any]
) -> None:
    central = {"name": "c0", "central": True, "rendezvous_port": free_port("127.0.0.1"), **cell}
    run = RunConfig.model_validate({**run.model_dump(), "cells": [central]})
    settings = worker_settings(run, database, tmp_path)

    def is_up() -> bool:
        with transaction(engine) as session:
            row = next(iter(q.cells(session, run.run_id)), None)
            return row is not None and row.routable and row.trainer_incarnation is not None

    with process(settings, "agent", AGENT, {}) as agent:
        ranks_elsewhere: list[psutil.Process] = []
        if "nodes" in cell:
            argv, env = trainer_command(
                "workers.trainer", run.central, trainer_socket(settings.sockets, "c0", 1), 1, node=1
            )
            with process(settings, "machine-1", argv, env) as other:
                until(is_up, settings)
                ranks_elsewhere = family(other)
                check(agent, ranks_elsewhere, ranks=1)
        else:
            until(is_up, settings)
            check(agent, [], ranks=2)


def check(agent: psutil.Process, elsewhere: list[psutil.Process], ranks: int) -> None:
    mine = family(agent)
    trainers = [p for p in mine if "workers.trainer" in p.cmdline() and "torch.distributed.run" not in p.cmdline()]
    assert len(trainers) == ranks
    assert any("quiet_engine.py" in " ".join(p.cmdline()) for p in mine)
    agent.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs([*mine, *elsewhere], timeout=60)
    assert not alive


def family(process: psutil.Process) -> list[psutil.Process]:
    found = process.children(recursive=True)
    assert found
    return found


@contextmanager
def process(settings: WorkerSettings, name: str, argv: list[str], env: dict[str, str]) -> Iterator[psutil.Process]:
    with (settings.data / f"{name}.log").open("wb") as output:
        started = subprocess.Popen(argv, env={**os.environ, **settings.to_env(), **env}, stdout=output, stderr=output)
    try:
        yield psutil.Process(started.pid)
    finally:
        started.kill()
        started.wait()


def until(true: Callable[[], bool], settings: WorkerSettings) -> None:
    deadline = time.monotonic() + 300
    while not true():
        logs = [*settings.data.glob("*.log"), *settings.logs.glob("*.log")]
        assert time.monotonic() < deadline, "\n".join(f"{p.name}: {p.read_text()[-2000:]}" for p in logs)
        time.sleep(0.1)
