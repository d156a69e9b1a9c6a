"""A whole real stack, once a session: `gyre train` as a person would start it, on a run small enough for a test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import Engine, text

from gyre.cli.stackfile import StackState
from gyre.store.db import make_engine

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
START_S = 420.0
"""Two engines on two busy cores take minutes to start."""


@dataclass
class LiveRun:
    """A `gyre train` process with its data folder."""

    data: Path
    process: subprocess.Popen[bytes]
    log: Path

    def state(self) -> StackState:
        state = StackState.read(self.data)
        assert state is not None, f"no stack.json yet; see {self.log}"
        return state

    def ready(self) -> bool:
        state = StackState.read(self.data)
        return state is not None and state.state == "ready"

    def pid(self, name: str) -> int:
        pid = next(p.pid for p in self.state().processes if p.name == name)
        assert pid is not None, f"{name} has no process"
        return pid

    def kill(self, name: str) -> int:
        """kill -9 the process called `name` in stack.json; returns the pid it had."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def child(self, name: str, part: str) -> psutil.Process:
        """The child of `name` whose command line has `part`."""
        for child in psutil.Process(self.pid(name)).children():
            if any(part in word for word in child.cmdline()):
                return child
        raise AssertionError(f"{name} has no child with {part!r} in its command line")

    def ask(self, sql: str, **values: object) -> list[tuple[object, ...]]:
        """Rows of one query, asked again while Postgres is away."""
        engine: Engine = make_engine(self.state().database_url, pool_size=1)
        try:
            with engine.connect() as connection:
                return [tuple(row) for row in connection.execute(text(sql), values)]
        finally:
            engine.dispose()

    def wait_for(self, what: str, true: Callable[[], bool], within_s: float = START_S) -> None:
        end = time.monotonic() + within_s
        while not true():
            assert self.process.poll() is None, f"gyre train ended while waiting for {what}:\n{self.log.read_text()}"
            assert time.monotonic() < end, f"{what}: not within {within_s:g} s\n{self.log.read_text()}"
            time.sleep(0.2)

    def settled(self) -> int:
        return int(str(self.ask("select count(*) from rollouts where state = 'settled'")[0][0]))


def run_file(
    folder: Path,
    *,
    steps: int,
    layouts: tuple[str, str] = ("{}", "{}"),
    budget: int = 2048,
    scheduling: str = "elastic",
    stack: str = "",
) -> Path:
    """A run of two cells on the quickstart's policy and tasks: 2 groups of 4 rollouts a step, no evaluation.

    `layouts`: of central's trainer and the satellite's, in TOML. `budget`: tokens of a micro-batch.
    `stack`: lines of [stack].
    """
    path = folder / "run.toml"
    path.write_text(f"""
name = "e2e"
seed = 1
steps = {steps}
[policy]
path = "{QUICKSTART}/policy"
context = 1024
[tasks]
train = "{QUICKSTART}/tasks/train"
[harness]
config = "{QUICKSTART}/mini.yaml"
[rollouts]
groups_per_step = 2
group_size = 4
max_concurrent = 8
time_limit_s = 240.0
[sampling]
max_tokens = 64
[objective]
clip_low = 0.2
clip_high = 0.28
[trainer]
micro_batch_tokens = {budget}
[trainer.optimizer]
lr = 4e-4
[serving]
max_running = 8
kv_tokens = 16384
[scheduling]
policy = "{scheduling}"
min_backlog_tokens = 256
[[cells]]
name = "central"
central = true
cpus = [0]
layout = {layouts[0]}
[[cells]]
name = "satellite"
cpus = [{1 if (os.cpu_count() or 1) > 1 else 0}]
layout = {layouts[1]}
[stack]
{stack}
""")
    return path


@pytest.fixture
def start_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LiveRun]]:
    """Start `gyre train`; at the end of the test everything is stopped, whatever happened."""
    runs: list[LiveRun] = []

    def start(steps: int, data: Path | None = None, **more: Any) -> LiveRun:
        folder = data or tmp_path_factory.mktemp("e2e")
        log = folder / f"train-{len(runs)}.log"
        argv = [sys.executable, "-m", "gyre.cli.main", "train", str(run_file(folder, steps=steps, **more))]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*argv, "--data", str(folder / "data"), "--keep"],
                stdout=out,
                stderr=out,
                start_new_session=True,
                # A shell that puts this test in its background has Ctrl-C ignored, and a child would inherit that.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        runs.append(LiveRun(folder / "data", process, log))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGINT)
            run.process.wait(120)
        state = StackState.read(run.data)
        if state is not None and state.alive:
            subprocess.run(
                [sys.executable, "-m", "gyre.cli.main", "down", "--data", str(run.data)], check=True, timeout=180
            )
