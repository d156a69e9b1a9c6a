"""A real Temporal server for tests, as one process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from gyre.ports import free_port
from workflows.attributes import registration

NAMESPACE = "gyre"
FAST = (
    "history.transferProcessorMaxPollRPS=2000",
    "history.timerProcessorMaxPollRPS=2000",
    "history.visibilityProcessorMaxPollRPS=2000",
    'history.timerProcessorMaxTimeShift="20ms"',
)
START_S = 300.0
PATIENCE_S = 600.0  # of a test's client
STARTS = 3
"""Beside ours it takes ports of its own choice, which somebody's outgoing connection may have by the time it listens;
then it ends."""


async def connect(server: TemporalServer) -> Client:
    """A client that asks again where a server that is crowded out has not answered in the time that it gives itself.

    What is asked again counts once: every request that changes something has an id.
    """
    client = await Client.connect(server.address, namespace=NAMESPACE)
    service = client.service_client
    once, deadline = service._rpc_call, time.monotonic() + PATIENCE_S

    async def patient(*what: Any, **how: Any) -> Any:
        while True:
            try:
                return await once(*what, **how)
            except RPCError as error:
                if error.status != RPCStatusCode.DEADLINE_EXCEEDED or time.monotonic() > deadline:
                    raise

    service._rpc_call = patient  # type: ignore[method-assign]
    return client


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
        for _ in range(STARTS):
            with self._log.open("ab") as log:
                self.process = subprocess.Popen(
                    self._argv, stdout=log, stderr=log, env={**os.environ, "TEMPORAL_VERSION_CHECK_DISABLED": "1"}
                )
            if asyncio.run(self._ready(self.process)):
                return
        raise RuntimeError(f"Temporal ended at each of {STARTS} starts; see {self._log}")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """At once: it has nothing to save, and an orderly end takes it as long as the machine pleases."""
        if self.process is not None:
            self.kill()

    async def _ready(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether it answers in the end; else it has ended."""
        deadline = time.monotonic() + START_S
        while process.poll() is None:
            try:
                client = await Client.connect(self.address, namespace=NAMESPACE)
                await client.count_workflows()
                return True
            except Exception as error:  # the namespace comes a moment after the port
                if time.monotonic() > deadline:
                    raise RuntimeError(f"Temporal does not answer within {START_S:g} s; see {self._log}") from error
            await asyncio.sleep(0.1)
        return False
