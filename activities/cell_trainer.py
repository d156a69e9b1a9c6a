"""The trainer process of a cell: kept alive, and reached."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from activities.cell_process import BackOff, FirstStart
from gyre.config import CellConfig
from gyre.ports import LOOPBACK, is_loopback
from gyre.serving.process import child_setup, end_group
from gyre.training.client import TrainerClient
from gyre.training.launch import trainer_command
from gyre.training.protocol import KEEPER, TOKEN, Endpoint, TrainerStatus, TrainerUnavailable

log = logging.getLogger("gyre.cell")

TRAINER_MODULE = "workers.trainer"
"""What is run as the trainer's process."""
START_S = 900.0
"""How long a trainer may take to import, load and publish."""
HEALTH_S = 5.0
"""How long an answer to `status` may take, which waits for no computation, and the pause between two questions."""
SILENT_S = 60.0
"""A trainer that answers no question within so long is ended and started anew (after twice that, if it hangs)."""


def trainer_socket(sockets: Path, cell: str, epoch: int) -> Path:
    """Where the trainer of `cell` listens that its agent of that epoch keeps: an agent that was replaced never reaches
    its successor's trainer, nor takes its place."""
    return sockets / f"trainer-{cell}-{epoch}.sock"


class CellTrainer:
    """Keeps one trainer running. `ready` is set while it answers; `incarnation` names its present life."""

    def __init__(
        self, cell: CellConfig, sockets: Path, log_path: Path, env: Mapping[str, str], module: str = TRAINER_MODULE,
        *, host: str = LOOPBACK,
    ) -> None:  # fmt: skip
        """Central's listens at `host` too, where that is an address that other machines reach."""
        self._cell, self._log_path, self._env, self._module = cell, log_path, dict(env), module
        self._sockets, self._epoch, self._host, self._token = sockets, 0, host, ""
        self._socket = trainer_socket(sockets, cell.name, 0)
        self.client = TrainerClient(self._socket)
        self.ready = asyncio.Event()
        self.incarnation: str | None = None
        self.endpoint: Endpoint | None = None
        """Where agents on other machines reach the living trainer, if they can."""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the living trainer, or None."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def take(self, epoch: int) -> None:
        """The agent has taken its cell: the trainers that it starts commit in this epoch. What is left of the sockets
        of agents before is removed."""
        self._epoch = epoch
        self._socket = trainer_socket(self._sockets, self._cell.name, epoch)
        self.client = TrainerClient(self._socket)
        for past in self._sockets.glob(f"trainer-{self._cell.name}-*.sock"):
            number = past.stem.removeprefix(f"trainer-{self._cell.name}-")
            if number.isdigit() and int(number) < epoch:
                past.unlink(missing_ok=True)

    async def keep(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Start the trainer, and again whenever it dies; `changed` is called when it comes and when it goes.

        Raises CannotStart where it ends at every start.
        """
        back_off, first = BackOff(), FirstStart("the trainer")
        while True:
            back_off.started()
            process = self._start()
            try:
                status = await self._wait_ready(process)
            except TrainerUnavailable as error:
                log.error("trainer: %s", error)
                if process.poll() is not None:
                    first.failed(process.returncode, f"{error}; it ends: {last_line(self._log_path)}")
            else:
                first.worked()
                self.incarnation = status.incarnation
                self.endpoint = None if status.address is None else Endpoint(status.address, self._token)
                self.ready.set()
                log.info("trainer %s: ready at v%s", status.incarnation[:8], status.version)
                await changed()
                await self._until_gone(process)
            self.ready.clear()
            self.incarnation = self.endpoint = None
            await changed()
            await asyncio.to_thread(self.stop)
            pause = back_off.died()
            log.info("trainer: starts again in %.0f s", pause)
            await asyncio.sleep(pause)

    async def _until_gone(self, process: subprocess.Popen[bytes]) -> None:
        silent = 0.0
        while silent < SILENT_S:
            for _ in range(int(HEALTH_S / 0.1)):
                if process.poll() is not None:
                    log.error("trainer: died with code %s", process.returncode)
                    return
                await asyncio.sleep(0.1)
            try:
                await self.client.status(HEALTH_S)
                silent = 0.0
            except TrainerUnavailable:
                silent += HEALTH_S
        log.error("trainer: no answer for %.0f s; it is ended", silent)

    def stop(self, grace_s: float = 2.0) -> None:
        """End the trainer; `keep` must have been cancelled before. Blocks a few seconds at most."""
        self.ready.clear()
        process, self._process = self._process, None  # `keep` and the agent's end may both call, on two threads
        if process is not None:
            end_group(process, grace_s)

    async def status(self) -> TrainerStatus:
        """State of the living trainer; waits for one."""
        await self.ready.wait()
        return await self.client.status()

    def _start(self) -> subprocess.Popen[bytes]:
        self._socket.unlink(missing_ok=True)  # of a trainer that was killed
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        argv, env = trainer_command(self._module, self._cell, self._socket, self._epoch)
        if self._cell.central and not is_loopback(self._host):
            self._token = env[TOKEN] = secrets.token_urlsafe(24)
        with self._log_path.open("ab") as output:
            self._process = subprocess.Popen(
                argv,
                env={**os.environ, **env, **self._env, KEEPER: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=child_setup(self._cell.cpus),
            )
        return self._process

    async def _wait_ready(self, process: subprocess.Popen[bytes]) -> TrainerStatus:
        deadline = asyncio.get_running_loop().time() + START_S
        while True:
            with contextlib.suppress(TrainerUnavailable):
                status = await self.client.status()
                if status.busy != "start":
                    return status
            if process.poll() is not None:
                raise TrainerUnavailable(f"ended with code {process.returncode} at its start; see {self._log_path}")
            if asyncio.get_running_loop().time() > deadline:
                raise TrainerUnavailable(f"not ready after {START_S:.0f} s; see {self._log_path}")
            await asyncio.sleep(0.1)


def last_line(log_path: Path) -> str:
    """The last line of a log that says something."""
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines() if log_path.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "without a word")
