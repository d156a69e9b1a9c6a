"""One detached harness process in one folder: start it, find it again from any process, wait for it, end it.

Every function takes the folder (see shepherd.py for the files in it) and none keeps state, so whoever comes after a
crash calls the same function again.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gyre.harness import shepherd
from gyre.harness.base import BOX, HarnessError, Launch

if TYPE_CHECKING:
    from gyre.harness.forkserver import ForkServer

GRACE_S = 2.0
"""Time between TERM and KILL when a process tree is ended."""

_SHEPHERD = Path(shepherd.__file__)
_POLL_S = 0.1  # only where the kernel has no pidfd


@dataclass(frozen=True)
class NotStarted:
    """Nothing was ever started in this folder."""


@dataclass(frozen=True)
class Running:
    """The shepherd lives. `pid` is its process, `harness_pid` the harness's; `started` is in epoch seconds."""

    pid: int
    harness_pid: int
    started: float


@dataclass(frozen=True)
class Exited:
    """The harness and all its descendants are gone.

    `code` is the exit code, None when a signal ended the harness; `reason` is `exited`, or `killed` when kill_tree
    ended it; `cpu_s` is of the whole tree (None if the shepherd itself had to be killed); `left_over` counts the
    processes that the harness left behind and that were ended then.
    """

    code: int | None
    signal: int | None
    reason: str
    cpu_s: float | None
    started: float
    ended: float
    left_over: int


@dataclass(frozen=True)
class Lost:
    """It was started, its shepherd is gone, and nobody wrote how it ended: the machine or the shepherd died."""

    started: float


Status = NotStarted | Running | Exited | Lost


@dataclass(frozen=True)
class Started:
    """What runs (or ran) in the folder: the shepherd's pid, its start in clock ticks since boot, and whether this call
    found it there (`attached`) or started it."""

    pid: int
    start_time: int
    attached: bool


def start(launch: Launch, folder: Path, *, fork_server: ForkServer | None = None, grace_s: float = GRACE_S) -> Started:
    """Run `launch` detached in `folder`, once: if something was ever started there, attach to it instead.

    Returns as soon as the process exists (10-40 ms). With `fork_server` and a launch that can be preloaded the
    process is forked warm. Raises HarnessError when nothing could be started. A command that cannot be executed is not
    an error here: it exits with 127 or 126, and says why in harness.log.
    """
    folder = folder.resolve()
    if not folder.is_dir():
        raise HarnessError(f"{folder}: no such folder; prepare the workspace before the harness is started")
    if (found := _read(folder / shepherd.PID_FILE)) is not None:
        return Started(found["pid"], found["start_time"], attached=True)
    for path, text in launch.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    spec: shepherd.Spec = {
        "folder": str(folder),
        "argv": list(launch.argv),
        "env": dict(launch.env),
        "cwd": str(launch.cwd),
        "grace_s": grace_s,
    }
    if fork_server is not None and launch.preload is not None:
        spec["argv"] = spec["argv"][1:]  # sys.argv of the program: the interpreter is the fork-server itself
        answer = fork_server.fork(launch.preload, spec)
    else:
        answer = _start_cold(spec)
    if "error" in answer:
        raise HarnessError(f"{folder}: the harness could not be started: {answer['error']}")
    found = _read(folder / shepherd.PID_FILE)
    if found is None:  # another shepherd holds the lock and is about to write it
        found = _wait_for_file(folder / shepherd.PID_FILE)
    return Started(found["pid"], found["start_time"], attached=answer["attached"])


def status(folder: Path) -> Status:
    """What has become of the process in `folder`."""
    ended = _read(folder / shepherd.EXIT_FILE)
    if ended is None:
        found = _read(folder / shepherd.PID_FILE)
        if found is None:
            return NotStarted()
        if _lives(found):
            return Running(found["pid"], found["harness_pid"], found["started"])
        ended = _read(folder / shepherd.EXIT_FILE)  # it may have ended between the two looks
        if ended is None:
            return Lost(found["started"])
    return Exited(**ended)


async def wait(folder: Path) -> Exited | Lost | NotStarted:
    """Wait until the process in `folder` is gone; costs nothing meanwhile. Cancelling the wait leaves it running."""
    while isinstance(now := status(folder), Running):
        fd = _pidfd(now.pid)
        if fd is None:
            await asyncio.sleep(_POLL_S)
            continue
        try:
            if isinstance(status(folder), Running):  # else the pid may be somebody else's by now
                gone = asyncio.Event()
                loop = asyncio.get_running_loop()
                loop.add_reader(fd, gone.set)
                try:
                    await gone.wait()
                finally:
                    loop.remove_reader(fd)
        finally:
            os.close(fd)
    return now


def wait_blocking(folder: Path, timeout_s: float) -> Status:
    """Wait at most `timeout_s` seconds; the state then, which is Running when the time was up."""
    deadline = time.monotonic() + timeout_s
    while isinstance(now := status(folder), Running):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        fd = _pidfd(now.pid)
        if fd is None:
            time.sleep(min(left, _POLL_S))
            continue
        try:
            if isinstance(status(folder), Running):
                poller = select.poll()
                poller.register(fd, select.POLLIN)
                poller.poll(int(left * 1000) + 1)
        finally:
            os.close(fd)
    return now


def kill_tree(folder: Path, *, patience_s: float = 5.0) -> Status:
    """End the process in `folder` with every descendant, also those that left its session or process group.

    The shepherd does it (TERM, grace, KILL) and writes exit.json with the reason `killed`. If the shepherd does not
    within its grace and `patience_s` seconds, or is gone, everything is killed from here. Afterwards the state is
    Exited (or Lost, NotStarted as before). Safe to call again, and on what has ended by itself.
    """
    found = _read(folder / shepherd.PID_FILE)
    if found is None:
        return NotStarted()
    if isinstance(status(folder), Running):
        shepherd.send([found["pid"]], signal.SIGTERM)
        shepherd.send([found["pid"]], signal.SIGCONT)
        now = wait_blocking(folder, found["grace_s"] + patience_s)
        if not isinstance(now, Running):
            return now if isinstance(now, Exited) else _sweep(folder, found)
        _sweep(folder, found)
        if _read(folder / shepherd.EXIT_FILE) is None:
            shepherd.write_json(
                str(folder / shepherd.EXIT_FILE),
                {
                    "code": None,
                    "signal": int(signal.SIGKILL),
                    "reason": "killed",
                    "left_over": 0,
                    "cpu_s": None,
                    "started": found["started"],
                    "ended": time.time(),
                },
            )
    elif isinstance(status(folder), Lost):
        _sweep(folder, found)
    return status(folder)


def end_all(rollouts: Path) -> int:
    """End every harness and grader that still runs anywhere below `rollouts`; how many there were.

    For shutting a stack down. A folder that holds a pid.json is a rollout's: below it only graders are looked for.
    """
    running: list[Path] = []
    for top, folders, files in os.walk(rollouts):
        if shepherd.PID_FILE in files:
            here = Path(top)
            attempts = (f for f in here.glob("verifier/*") if f.is_dir())
            running += [f for f in (here, *attempts) if isinstance(status(f), Running | Lost)]
            folders.clear()
        else:
            folders[:] = [f for f in folders if f != BOX]
    living = [folder for folder in running if isinstance(status(folder), Running)]
    for folder in living:  # all get their TERM before anybody's grace is waited for
        shepherd.send([pid for pid in [_read_pid(folder)] if pid], signal.SIGTERM)
    for folder in running:
        kill_tree(folder)
    return len(living)


def _sweep(folder: Path, found: dict[str, Any]) -> Status:
    """Kill what the shepherd should have killed: its descendants, the harness, and whatever bears its mark."""

    def strays() -> list[int]:
        pids = [*shepherd.descendants(found["pid"])] if _lives(found) else []
        if shepherd.start_time(found["harness_pid"]) == found["harness_start_time"]:
            pids += [found["harness_pid"], *shepherd.descendants(found["harness_pid"])]
        for pid in _marked(found["mark"]):
            pids += [pid, *shepherd.descendants(pid)]
        return [pid for pid in dict.fromkeys(pids) if pid != found["pid"]]

    if found["boot_id"] != shepherd.boot_id():
        return status(folder)
    deadline = time.monotonic() + 5.0
    while (pids := strays()) and time.monotonic() < deadline:
        shepherd.kill_all(strays)
        time.sleep(0.02)
    if pids:
        raise HarnessError(f"{folder}: processes {pids} do not end on KILL; look at them with `ps -o pid,stat,cmd`")
    if _lives(found):
        shepherd.send([found["pid"]], signal.SIGKILL)
        while _lives(found) and time.monotonic() < deadline:  # a killed process takes a moment to go
            time.sleep(0.005)
    return status(folder)


def _marked(mark: str) -> list[int]:
    """Living processes whose environment at exec holds the mark."""
    needle, pids = f"{shepherd.MARKER}={mark}".encode(), []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if needle in file.read() and shepherd.start_time(int(name)) is not None:
                    pids.append(int(name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # gone meanwhile, or another user's
    return pids


def _start_cold(spec: shepherd.Spec) -> dict[str, Any]:
    # -I -S: nothing but the standard library, 15 ms. Not this process's environment either: it holds secrets.
    script = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_SHEPHERD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"LC_ALL": "C.UTF-8"},
        cwd="/",
    )
    assert script.stdin is not None and script.stdout is not None
    with script.stdout:
        script.stdin.write(json.dumps(spec).encode())
        script.stdin.close()
        line = script.stdout.readline()
    script.wait()
    if not line:
        return {"error": f"{sys.executable} {_SHEPHERD} ended with {script.returncode} and without an answer"}
    answer: dict[str, Any] = json.loads(line)
    return answer


def _lives(found: dict[str, Any]) -> bool:
    here: bool = shepherd.start_time(found["pid"]) == found["start_time"] and found["boot_id"] == shepherd.boot_id()
    return here


def _pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None if it has ended or the kernel has no pidfds."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise HarnessError(f"{path}: not JSON ({error}); the disk or another program damaged it") from error
    return value


def _read_pid(folder: Path) -> int | None:
    found = _read(folder / shepherd.PID_FILE)
    return found["pid"] if found and _lives(found) else None


def _wait_for_file(path: Path, timeout_s: float = 10.0) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (value := _read(path)) is not None:
            return value
        time.sleep(0.01)
    raise HarnessError(f"{path}: another process holds {shepherd.LOCK_FILE} but writes nothing; end it, then try again")
