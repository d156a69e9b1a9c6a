"""A rank that ends and a rank that is stopped are told apart, and a busy one is heard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre.serving.process import child_setup
from gyre.training.pulse import end_of, start_rank

RANK = """
from gyre.training.pulse import beat
beat(every_s=0.05)
while True:
    pass
"""


@pytest.fixture
def rank() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A rank that computes, and was heard."""
    process, heard = start_rank([sys.executable, "-c", RANK], os.environ, child_setup())
    for _ in range(5):
        assert os.read(heard, 1) == b"."
    yield process, heard
    process.kill()
    process.wait()
    os.close(heard)


def test_a_rank_that_is_killed(rank: tuple[subprocess.Popen[bytes], int]) -> None:
    rank[0].kill()
    assert end_of(*rank, silent_s=300) == "ended with code -9"


def test_a_rank_that_is_stopped(rank: tuple[subprocess.Popen[bytes], int]) -> None:
    rank[0].send_signal(signal.SIGSTOP)
    assert end_of(*rank, every_s=0.5, silent_s=3) == "did not run for 3 s"


def test_a_rank_that_ends_while_a_process_that_it_forked_lives_on(tmp_path: Path) -> None:
    """That one holds the rank's end of the pipe open."""
    note = tmp_path / "pid"
    rank = f"import os, time\npid = os.fork()\nif pid:\n    open({str(note)!r}, 'w').write(str(pid))\n    os._exit(7)\n"
    process, heard = start_rank([sys.executable, "-c", rank + "time.sleep(600)"], os.environ, lambda: None)
    try:
        assert end_of(process, heard, every_s=0.5, silent_s=300) == "ended with code 7"
    finally:
        os.kill(int(note.read_text()), signal.SIGKILL)
        os.close(heard)
