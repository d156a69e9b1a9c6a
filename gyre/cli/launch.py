"""Starting and stopping the supervisor, which is a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from gyre.cli.errors import CliError
from gyre.cli.progress import StackProgress
from gyre.cli.stackfile import StackState
from gyre.config import RunConfig
from gyre.ports import is_loopback

SOURCE = Path(__file__).resolve().parents[2]
"""Folder of the packages gyre, workers, workflows and activities."""
_PR_SET_PDEATHSIG = 1


MAY_CHANGE = frozenset({"steps", "stack", "retention"})
"""Tables and fields of a run file that a resumed run may have changed."""


def write_run_config(data: Path, run: RunConfig) -> Path:
    """Write the resolved run to `<data>/runs/<run_id>/config.json`, which every worker reads.

    Raises CliError where the run began with other settings: half of it would have been made with each.
    """
    path = data / "runs" / run.run_id / "config.json"
    if path.exists() and (changed := _changes(json.loads(path.read_bytes()), run.model_dump(mode="json"))):
        raise CliError(
            f"run {run.run_id} began with other settings ({', '.join(changed)}); give the run file another name or"
            f" seed, or use another data folder than {data}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(run.model_dump_json(indent=1), encoding="utf-8")
    os.replace(partial, path)
    return path


def _changes(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Fields that differ, as `rollouts.group_size was 8`."""
    found: list[str] = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old == new or prefix + name in MAY_CHANGE:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            found += _changes(old, new, f"{prefix}{name}.")
        else:
            found.append(f"{prefix}{name} was {json.dumps(old)}, is now {json.dumps(new)}")
    return found


def start_supervisor(
    data: Path, run_config: Path | None, *, tied: bool, agent: str | None = None
) -> subprocess.Popen[bytes]:
    """Start the supervisor of `data`. `tied`: it stops, with all its processes, when this process dies.

    `agent`: module that is run as each cell's agent, instead of Gyre's own.
    """
    (data / "logs").mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "workers.stack", "--data", str(data)]
    argv += ["--run-config", str(run_config)] if run_config else []
    argv += ["--agent", agent] if agent else []
    path = os.environ.get("PYTHONPATH", "")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), *([path] if path else [])])}
    with stack_log(data).open("ab") as log:
        # A session of its own: Ctrl-C reaches this process alone, which then stops the stack in order.
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
            preexec_fn=dies_with_parent() if tied else None,
        )


def dies_with_parent() -> Callable[[], None]:
    """For `preexec_fn`: the new process gets SIGTERM when this one dies, however that happens."""
    libc = ctypes.CDLL(None)

    def in_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)

    return in_child


def say_who_is_let_in(run: RunConfig, data: Path, console: Console) -> None:
    """Where the stack of `run` is reached from other machines: what that means, and how their cells are started."""
    stack = run.stack
    if is_loopback(stack.listen):
        return
    console.print(
        f"Postgres and cells listen at {stack.listen}, Temporal at every one of this machine; only Postgres asks for "
        "a password.",
        style="yellow", soft_wrap=True,
    )  # fmt: skip
    if stack.remote_cells:
        names = ", ".join(stack.remote_cells)
        how = shlex.join(["gyre", "cells", "--data", str(data)])
        console.print(f"Started by you on other machines: {names}. How, once the stack is up: {how}", soft_wrap=True)


def stack_log(data: Path) -> Path:
    """Log of the supervisor."""
    return data / "logs" / "stack.log"


def wait_ready(data: Path, supervisor: subprocess.Popen[bytes], console: Console) -> StackState:
    """Show what is being waited for until the stack is ready. Raises CliError where it fails."""
    with StackProgress(console) as progress:
        while True:
            state = StackState.read(data)
            if state is not None and state.pid == supervisor.pid:
                progress.show(state)
                if state.state == "ready":
                    return state
            if supervisor.poll() is not None:
                raise CliError(_why_it_ended(data, supervisor.pid))
            time.sleep(0.1)


def stop_supervisor(
    data: Path, console: Console, limit_s: float = 60.0, started: subprocess.Popen[bytes] | None = None
) -> bool:
    """Ask the stack on `data` to stop and wait for it. False: none ran. Raises CliError where it does not end.

    `started`: a supervisor of this process's own, which may not have written its state yet.
    """
    state = StackState.read(data)
    if started is not None and started.poll() is None and (state is None or state.pid != started.pid):
        started.terminate()  # it has started nothing yet, or hears of it as soon as it listens
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(limit_s)
        state = StackState.read(data)
    if state is None or not state.alive:
        return False
    os.kill(state.pid, signal.SIGTERM)
    begin = time.monotonic()
    with StackProgress(console, verb="stopped") as progress:
        while state.alive:
            if time.monotonic() - begin > limit_s:
                raise CliError(f"the stack (pid {state.pid}) does not stop; see {stack_log(data)}")
            if (newer := StackState.read(data)) is not None:
                progress.show(newer)
            time.sleep(0.1)
    return True


def _why_it_ended(data: Path, pid: int) -> str:
    state = StackState.read(data)
    if state is not None and state.pid == pid and state.message:
        return state.message
    text = stack_log(data).read_text(encoding="utf-8", errors="replace").splitlines()
    last = next((line for line in reversed(text) if line.strip()), "no word in its log")
    return f"{last.removeprefix('gyre: ')} (log: {stack_log(data)})"
