"""The agent process: on its queue, and gone with all its children when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import psutil
from sqlalchemy import Engine
from temporalio.testing import WorkflowEnvironment

from gyre.config import RunConfig
from gyre.store import queries as q
from gyre.store.db import transaction
from gyre.store.models import Cell
from tests.settings import worker_settings
from workers.settings import WorkerSettings
from workflows import messages as m
from workflows.names import cell_queue

AGENT, QUIET = "workers.cell_agent", "tests.cells.quiet_agent"
TEMPORAL = str(Path(sys.executable).parent / "temporal")


def start(settings: WorkerSettings, log: Path, module: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", module, "--cell", "c0"]
    with log.open("ab") as output:
        return subprocess.Popen(argv, env={**os.environ, **settings.to_env()}, stdout=output, stderr=output)


def until(true: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 300
    while not true():
        assert time.monotonic() < deadline, f"did not come true; {log.read_text()[-3000:]}"
        time.sleep(0.1)


async def test_an_agent_serves_its_queue_and_takes_its_children_with_it(
    run: RunConfig, engine: Engine, database: str, tmp_path: Path
) -> None:
    log = tmp_path / "agent.log"

    def cell() -> Cell | None:
        with transaction(engine) as session:
            return next((c for c in q.cells(session, run.run_id) if c.name == "c0"), None)

    def is_up() -> bool:
        row = cell()
        return row is not None and row.routable and row.trainer_incarnation is not None

    async with await WorkflowEnvironment.start_local(namespace="gyre", dev_server_existing_path=TEMPORAL) as temporal:
        address = temporal.client.service_client.config.target_host
        settings = worker_settings(run, database, tmp_path, temporal=address)
        agent = start(settings, log, AGENT)
        try:
            until(is_up, log)
            served = await temporal.client.execute_activity(
                "cell_load_weights",
                m.CellWeights(run.run_id, "c0", 0),
                id=uuid.uuid4().hex,
                task_queue=cell_queue(run.run_id, "c0"),
                result_type=m.CellServing,
                start_to_close_timeout=timedelta(seconds=60),
            )
            assert served == m.CellServing(0)
            first = cell()
            assert first is not None
            children = psutil.Process(agent.pid).children(recursive=True)
            assert len(children) >= 4  # engine, scheduler, detokenizer, trainer
            agent.send_signal(signal.SIGKILL)
            agent.wait()
            _, alive = psutil.wait_procs(children, timeout=60)
            assert not alive

            agent = start(settings, log, QUIET)  # its row still speaks of the dead until it reports
            until(lambda: (row := cell()) is not None and not row.routable, log)
            until(lambda: (row := cell()) is not None and row.trainer_incarnation is not None, log)
            second = cell()
            assert second is not None and second.trainer_incarnation != first.trainer_incarnation
            children = psutil.Process(agent.pid).children(recursive=True)
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(120) == 0
            assert not psutil.wait_procs(children, timeout=60)[1]
            last = cell()
            assert last is not None and (last.role, last.routable) == ("down", False)
        finally:
            agent.kill()
            agent.wait()


def test_a_wrong_cell_is_one_line(run: RunConfig, tmp_path: Path) -> None:
    settings = worker_settings(run, "postgresql+psycopg://x@127.0.0.1:9/x", tmp_path)
    argv = [sys.executable, "-m", "workers.cell_agent", "--cell", "c7"]
    ended = subprocess.run(argv, env={**os.environ, **settings.to_env()}, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr == "gyre: --cell: the run has no cell 'c7'; its cells are ['c0', 'c1']\n"
