"""A real Temporal server for tests, as one process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Self

from temporalio.client import Client

from gyre.ports import free_port
from workflows.attributes import registration

NAMESPACE = "gyre"
FAST = (
    "history.transferProcessorMaxPollRPS=2000",
    "history.timerProcessorMaxPollRPS=2000",
    "history.visibilityProcessorMaxPollRPS=2000",
    'history.timerProcessorMaxTimeShift="20ms"',
)


class TemporalServer:
    """`temporal server start-dev` on a free port of the loopback; in memory unless `database` is given."""

    def __init__(self, log: Path, *, database: Path | None = None, settings: tuple[str, ...] = ()) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._argv = [
            str(Path(sys.executable).parent / "temporal"), "server", "start-dev", "--ip", "127.0.0.1",
            "--port", str(self.port), "--headless",
            "--log-level", "error", "--namespace", NAMESPACE,
        ]  # fmt: skip
        if database is not None:
            self._argv += ["--db-filename", str(database), "--sqlite-pragma", "journal_mode=WAL"]
            self._argv += ["--sqlite-pragma", "synchronous=NORMAL"]
        for name, kind in registration().items():
            self._argv += ["--search-attribute", f"{name}={kind}"]
        for setting in (*FAST, *settings):
            self._argv += ["--dynamic-config-value", setting]
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._argv, stdout=log, stderr=log, env={**os.environ, "TEMPORAL_VERSION_CHECK_DISABLED": "1"}
            )
        asyncio.run(self._ready())

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=20)

    async def _ready(self) -> None:
        for _ in range(200):
            try:
                client = await Client.connect(self.address, namespace=NAMESPACE)
                await client.count_workflows()
                return
            except RuntimeError as error:
                last: Exception = error
            except Exception as error:  # the namespace comes a moment after the port
                last = error
            await asyncio.sleep(0.1)
        raise RuntimeError(f"Temporal does not answer: {last}; see {self._log}")
