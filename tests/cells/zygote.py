"""Trainer processes in a tenth of a second: forked from one that has imported what takes seconds.

`python -m tests.cells.zygote SOCKET` forks, for each connection, a child that runs `main()` of a module; it is told
{module, argv, env, output} and says {pid} and at the end {code}, as JSON lines. A `Zygote` stands where the agent has
the module `subprocess`. A child whose environment has NETNS lives in that network namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from gyre.serving.process import child_setup

NETNS = "GYRE_TEST_NETNS"
CLONE_NEWNET = 0x40000000
"""Of <sched.h>."""


class Forked:
    """What the agent uses of a `Popen`."""

    def __init__(self, connection: socket.socket) -> None:
        self._lines = connection.makefile("rb")
        self._connection = connection
        self.pid: int = json.loads(self._lines.readline())["pid"]
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            line = self._lines.readline()
            self.returncode = json.loads(line)["code"] if line else -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (600 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("trainer", timeout or 0)
            time.sleep(0.01)
        return code

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Forks:
    """Has the zygote that listens at `at` fork. `Popen` takes what `subprocess.Popen` does of what agents give."""

    DEVNULL, STDOUT = subprocess.DEVNULL, subprocess.STDOUT

    def __init__(self, at: Path) -> None:
        self.socket = at

    def lives(self) -> bool:
        """Whether it may still begin to answer."""
        return True

    def Popen(self, argv: Sequence[str], *, env: dict[str, str], stdout: IO[bytes], **_: Any) -> Forked:
        connection = socket.socket(socket.AF_UNIX)
        end = time.monotonic() + 300
        while True:
            try:
                connection.connect(str(self.socket))
                break
            except OSError:
                assert self.lives() and time.monotonic() < end, "the zygote does not answer"
                time.sleep(0.05)
        order = {"module": argv[2], "argv": list(argv[3:]), "env": env, "output": stdout.name}
        connection.sendall(json.dumps(order).encode() + b"\n")
        return Forked(connection)


class Zygote(Forks):
    """The process that forks, and what it is asked through."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "zygote.sock")
        argv = [sys.executable, "-m", "tests.cells.zygote", str(self.socket)]
        self._process = subprocess.Popen(argv, preexec_fn=child_setup())

    def lives(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(path: Path) -> None:
    """Fork for each connection. One thread, so that a fork finds nothing half-done."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(16)
    children: dict[int, socket.socket] = {}
    while True:
        if select.select([listener], [], [], 0.02)[0]:
            connection, _ = listener.accept()
            with connection.makefile("rb") as lines:
                order = json.loads(lines.readline())
            parent = os.getpid()
            if (pid := os.fork()) == 0:
                become(order, parent, [listener, connection, *children.values()])
            children[pid] = connection
            connection.sendall(json.dumps({"pid": pid}).encode() + b"\n")
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            with contextlib.suppress(OSError), children.pop(pid) as connection:
                connection.sendall(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode() + b"\n")


def become(order: dict[str, Any], parent: int, inherited: list[socket.socket]) -> None:
    """The child: its own session, environment and output, and gone with the zygote."""
    code = 1
    try:
        os.setsid()
        die_with(parent)
        for one in inherited:
            one.close()
        output = os.open(order["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        for number in (1, 2):
            os.dup2(output, number)
        os.environ.clear()
        os.environ.update(order["env"])
        sys.argv = [order["module"], *order["argv"]]
        if name := os.environ.get(NETNS):
            enter(name)
        importlib.import_module(order["module"]).main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def enter(namespace: str) -> None:
    """Live in this network namespace of `ip netns`, and so do what it starts."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(127)


if __name__ == "__main__":
    import torch

    import gyre.training.ranks
    import gyre.training.replica  # noqa: F401
    import workers.trainer  # noqa: F401
    from tests.cells import deadly  # noqa: F401

    torch.set_num_threads(1)
    serve(Path(sys.argv[1]))
