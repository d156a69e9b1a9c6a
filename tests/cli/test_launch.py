"""Starting and stopping the supervisor."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from gyre.cli.launch import stop_supervisor
from gyre.cli.stackfile import StackState


def test_a_supervisor_that_has_not_said_a_word_is_stopped_too(tmp_path: Path) -> None:
    """Ctrl-C in the first second: its state file is not there, or is that of the stack before."""
    StackState(state="stopped", pid=1, pid_start=-1).write(tmp_path)
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    begin = time.monotonic()
    stop_supervisor(tmp_path, Console(), started=started)
    assert started.poll() is not None
    assert time.monotonic() - begin < 30
