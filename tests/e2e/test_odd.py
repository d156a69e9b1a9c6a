"""A run through what kill -9 is not: an agent that freezes and thaws, a database that goes, a disk that is full."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import LiveRun
from tests.e2e.test_kill import PER_STEP, everything_is_accounted_for, harnesses

STEPS = 4
FROZEN_S = 45.0
"""Longer than a heartbeat's time-out (30 s), shorter than the silence after which a trainer counts as dead (60 s)."""
MB = 1 << 20


@contextlib.contextmanager
def disk(folder: Path, megabytes: int) -> Iterator[None]:
    """A file system of its own in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "gyre-test", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.skipif(not os.environ.get("GYRE_EVERY_FAULT"), reason="takes minutes: make faults")
@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk of our own needs root")
def test_a_run_goes_on_after_all_that_is_no_kill(
    start_run: Callable[..., LiveRun], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("odd")
    checkpoints = folder / "data" / "runs" / "e2e-s1" / "checkpoints"
    with disk(checkpoints, 12):  # one checkpoint fits, and the next one does not
        run = start_run(steps=STEPS, data=folder)
        run.wait_for("the first rollouts", lambda: run.ready() and harnesses(run) > 0)

        agent = run.pid("cell-satellite")
        os.kill(agent, signal.SIGSTOP)
        time.sleep(FROZEN_S)
        os.kill(agent, signal.SIGCONT)

        run.wait_for("a checkpoint that does not fit", lambda: "cannot be written, where" in trainers(run))
        subprocess.run(["mount", "-o", "remount,size=200m", str(checkpoints)], check=True)

        run.wait_for("calls of the third step", lambda: run.settled() >= 2 * PER_STEP and harnesses(run) > 0)
        run.kill("gateway")
        run.wait_for("settled rollouts of the third step", lambda: run.settled() > 2 * PER_STEP)
        run.kill("postgres")
        assert run.process.wait(timeout=900) == 0, run.log.read_text()
        everything_is_accounted_for(run, STEPS)
        assert run.ask("select name, epoch from cells order by name") == [("central", 1), ("satellite", 1)]


def trainers(run: LiveRun) -> str:
    return "".join(path.read_text(errors="replace") for path in (run.data / "logs").glob("trainer-*.log"))
