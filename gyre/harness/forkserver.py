"""The host's side of a warm fork-server (see warm_server.py): start it, ask it for a run, start it again if it died."""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

from gyre.harness import shepherd
from gyre.harness.base import HarnessError, Preload, tool_path

log = logging.getLogger(__name__)

_SERVER = Path(__file__).with_name("warm_server.py")


class ForkServer:
    """One warm process for one harness. Thread-safe: runs are forked one at a time, about 20 ms each.

    It ends when this process does; the runs that it forked do not.
    """

    def __init__(self, preload: Preload, sockets: Path, log_file: Path, *, start_timeout_s: float = 600.0) -> None:
        """`sockets` is the folder for its socket (made if missing, private); `log_file` gets its messages."""
        self._preload = preload
        self._socket = sockets.absolute() / f"warm-{os.getpid()}-{id(self):x}.sock"
        self._log_file = log_file.absolute()
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self.facts: dict[str, Any] = {}
        """What the server said when it was ready: seconds, cpu_s, modules, learned, failed."""

    @property
    def pid(self) -> int | None:
        """The server's process; None before start."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and wait until the harness is imported (4-6 CPU-seconds for mini-swe-agent).

        Raises HarnessError when it does not come up; its log says why.
        """
        with self._lock:
            self._start()

    def stop(self) -> None:
        """End the server; running harnesses stay."""
        with self._lock:
            if self._process is None:
                return
            assert self._process.stdin is not None
            self._process.stdin.close()  # its lifeline
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
            self._socket.unlink(missing_ok=True)

    def fork(self, preload: Preload, spec: shepherd.Spec) -> dict[str, Any]:
        """Fork one run; {"attached": bool} or {"error": text}. A server that died is started again first.

        Raises HarnessError when `preload` is another harness's, or no server can be had.
        """
        if preload != self._preload:
            raise HarnessError(f"the fork-server holds {self._preload.entry}, it cannot run {preload.entry}")
        with self._lock:
            if not self.alive:
                if self._process is not None:
                    log.warning("the fork-server died with %s; starting it again", self._process.returncode)
                self._start()
            try:
                return self._ask(spec)
            except OSError as error:
                # Asking again is safe: a shepherd that did start holds its folder's lock, and this attaches to it.
                log.warning("the fork-server does not answer (%s); starting it again", error)
                self._start()
                return self._ask(spec)

    def _ask(self, spec: shepherd.Spec) -> dict[str, Any]:
        folder = os.open(self._socket.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(30.0)
                connection.connect(f"/proc/self/fd/{folder}/{self._socket.name}")  # paths over 107 bytes
                connection.sendall(json.dumps(spec).encode() + b"\n")
                with connection.makefile("rb") as stream:
                    line = stream.readline()
        finally:
            os.close(folder)
        if not line:
            raise ConnectionError("no answer")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        config = {
            "socket": str(self._socket),
            "entry": self._preload.entry,
            "modules": list(self._preload.modules),
            "rehearsal": None if self._preload.rehearsal is None else str(self._preload.rehearsal),
        }
        home = self._log_file.parent / "warm-home"
        home.mkdir(exist_ok=True)
        env = {"PATH": tool_path(), "HOME": str(home), "LANG": "C.UTF-8", "TZ": "UTC", "TERM": "dumb"}
        with self._log_file.open("ab") as log_file:
            self._process = subprocess.Popen(
                [str(self._preload.python), "-I", str(_SERVER), json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env=env | dict(self._preload.env),
                cwd="/",
                start_new_session=True,
            )
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            readable, _, _ = select.select([stdout], [], [], self._start_timeout_s)
            line = stdout.readline() if readable else b""
        if not line:
            self._process.kill()
            code = self._process.wait()
            self._process = None
            raise HarnessError(
                f"the fork-server for {self._preload.entry} did not come up (exit {code}); see {self._log_file}, "
                "or set harness.warm = false"
            )
        self.facts = json.loads(line)
        log.info("fork-server for %s is ready: %s", self._preload.entry, self.facts)
