"""Who ends what a killed supervisor left, and when that is another one's business."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.stack.lock import StackLock

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def left_behind(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the stack at `tmp_path`."""
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    process = subprocess.Popen(argv, env={**os.environ, "GYRE_DATA": str(tmp_path)})
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[StackLock]:
    """Taken, by this process."""
    lock = StackLock(tmp_path)
    assert lock.acquire() is None
    yield lock
    lock.release()


def janitor(data: Path, supervisor: int) -> subprocess.Popen[bytes]:
    """Of a supervisor that has been killed."""
    argv = [sys.executable, "-m", "workers.stack.janitor", str(data), str(supervisor)]
    return subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL)


def test_it_waits_for_the_lock_of_the_one_that_was_killed(
    tmp_path: Path, lock: StackLock, left_behind: subprocess.Popen[bytes]
) -> None:
    cleaning = janitor(tmp_path, os.getpid())
    with pytest.raises(subprocess.TimeoutExpired):
        cleaning.wait(1.5)
    lock.release()
    assert cleaning.wait(120) == 0
    assert left_behind.wait(120) < 0


def test_it_leaves_all_to_a_supervisor_that_is_there_already(
    tmp_path: Path, lock: StackLock, left_behind: subprocess.Popen[bytes]
) -> None:
    assert janitor(tmp_path, os.getpid() + 1).wait(120) == 0
    assert left_behind.poll() is None
