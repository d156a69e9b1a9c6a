"""The process that starts TrainingRun and waits for its end (this package does not talk to Temporal itself)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gyre.cli.launch import SOURCE, dies_with_parent
from gyre.cli.stackfile import StackState


class Submission:
    """A running `workers.stack.submit`; it ends when the run does, and is killed with this process."""

    def __init__(self, data: Path, stack: StackState) -> None:
        self._log = data / "logs" / "submit.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "workers.stack.submit"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **stack.environment, "PYTHONPATH": str(SOURCE)},
                start_new_session=True,
                preexec_fn=dies_with_parent(),
            )

    @property
    def ended(self) -> bool:
        """Whether the run has ended (or could not be started)."""
        return self._process.poll() is not None

    def failure(self) -> str:
        """Why the run failed, in one line; '' where it did not."""
        if self._process.returncode == 0:
            return ""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        said = [line for line in lines if line.strip()]
        return said[-1].removeprefix("gyre: ") if said else f"the run's starter ended with {self._process.returncode}"

    def abandon(self) -> None:
        """End the waiting; the run itself goes on."""
        if not self.ended:
            self._process.kill()
            self._process.wait()
