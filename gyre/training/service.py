"""The trainer process's front: JSON lines over a unix socket, all work on one thread, `status` answered at once.

The few commands that may run beside the others (`Commands.beside`) have a thread each.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gyre.ports import is_token, notice_loss
from gyre.store.queries import FencedError
from gyre.training.protocol import (
    FENCED,
    FROM_AFAR,
    LINE_LIMIT,
    REFUSALS,
    WRONG_TOKEN,
    TrainerStatus,
    short_address,
)

log = logging.getLogger("gyre.trainer")

FIRST_WORD_S = 10.0
"""How long a connection from another machine may take to send its request."""
AFAR_LIMIT = 128
"""Connections from other machines at once; each is a file that this process has open. More are closed unheard."""


class Commands(Protocol):
    """What runs the commands; `gyre.training.replica.Replica` in the trainer process."""

    @property
    def version(self) -> int | None: ...

    @property
    def step_id(self) -> int | None: ...

    @property
    def held(self) -> Mapping[int, Any]:
        """Micro-batches in the accumulator."""
        ...

    @property
    def pushed(self) -> bool:
        """Whether a published gradient waits for `reset`."""
        ...

    @property
    def asleep(self) -> bool: ...

    def commands(self) -> dict[str, Callable[..., dict[str, Any]]]:
        """Command name -> method; keyword arguments in, a JSON object out."""
        ...

    def beside(self) -> dict[str, Callable[..., dict[str, Any] | None]]:
        """Those that may run while another one computes: as `commands`, or None where that is not so now."""
        ...


class TrainerService:
    """Serves a `Commands`. `start` builds it, on the work thread, while the socket already answers `status`.

    `afar`: address of this machine and the token, where trainers' agents on other machines may send `FROM_AFAR`.
    """

    def __init__(
        self, socket: Path, incarnation: str, start: Callable[[], Commands], afar: tuple[str, str] | None = None
    ) -> None:
        self.socket, self._afar = socket, afar
        self._address: str | None = None
        self.incarnation = incarnation
        self._start = start
        self._commands: Commands | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._beside: dict[str, ThreadPoolExecutor] = {}
        self._busy: str | None = "start"
        self._pending = 0
        self._fenced = asyncio.Event()
        self._why = ""
        self._afar_open = 0

    async def serve(self) -> None:
        """Serve until cancelled. Raises what `start` raised; FencedError, once the cell is another agent's."""
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        # A socket that a killed process left is taken over; the agent runs one trainer a cell.
        self.socket.unlink(missing_ok=True)
        with short_address(self.socket) as address:
            server = await asyncio.start_unix_server(self._connection, address, limit=LINE_LIMIT)
        async with contextlib.AsyncExitStack() as servers:
            await servers.enter_async_context(server)
            if self._afar is not None:
                await servers.enter_async_context(await self._listen(*self._afar))
            await self._on_thread("start", self._begin)
            await self._fenced.wait()
        raise FencedError(self._why)

    async def _listen(self, host: str, token: str) -> asyncio.Server:
        """The server at a free port of `host`. Raises OSError, which names the address."""
        try:
            server = await asyncio.start_server(partial(self._from_afar, token=token), host, 0, limit=LINE_LIMIT)
        except OSError as error:
            raise OSError(f"GYRE_HOST: cannot listen at {host}, give an address of this machine: {error}") from error
        self._address = f"{host}:{server.sockets[0].getsockname()[1]}"
        return server

    def _begin(self) -> None:
        self._commands = self._start()

    def status(self) -> TrainerStatus:
        """The state now."""
        c = self._commands
        return TrainerStatus(
            incarnation=self.incarnation,
            version=None if c is None else c.version,
            step_id=None if c is None else c.step_id,
            held=0 if c is None else len(c.held),
            pushed=c is not None and c.pushed,
            asleep=c is not None and c.asleep,
            busy=self._busy,
            waiting=max(0, self._pending - 1),
            address=self._address,
        )

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                await self._reply(writer, await self._answer(line))
        writer.close()

    async def _from_afar(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> None:
        """One request of another machine. Whoever is there may connect, so it costs little until it says the token."""
        self._afar_open += 1
        try:
            if self._afar_open > AFAR_LIMIT:
                log.warning("%d connections from other machines are open; one more is closed", AFAR_LIMIT)
                return
            notice_loss(writer.get_extra_info("socket"))
            async with asyncio.timeout(FIRST_WORD_S):
                line = await reader.readline()
            if line:
                await self._reply(writer, await self._answer(line, token))
        except (OSError, ValueError) as error:  # it went away (TimeoutError is an OSError), or its line has no end
            log.info("a connection from %s is closed: %r", writer.get_extra_info("peername"), error)
        finally:
            self._afar_open -= 1
            writer.close()

    async def _reply(self, writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
        try:
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        finally:
            if self._why:  # only now: whoever asked is told, if still there
                self._fenced.set()

    async def _answer(self, line: bytes, token: str | None = None) -> dict[str, Any]:
        """`token`: what the request must know, where it comes over the network."""
        number: Any = None
        try:
            request = json.loads(line)
            number, command, arguments = request["id"], request["command"], request.get("arguments", {})
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return _failure(number, "ProtocolError", f"a request is {{id, command, arguments}}: {error!r}")
        if token is not None:
            if not is_token(request.get("token", ""), token):
                return _failure(number, WRONG_TOKEN, "the token is not this trainer's; look up its row in `cells`")
            if command not in FROM_AFAR:
                return _failure(number, "ProtocolError", f"from another machine only {FROM_AFAR}, not {command!r}")
        if command == "status":
            return {"id": number, "result": vars(self.status())}
        try:
            result = await self._run_beside(command, arguments)
            if result is None:
                result = await self._on_thread(command, partial(self._run, command, arguments))
        except Exception as error:  # every failure of a command belongs to whoever sent it
            kind = type(error).__name__
            if isinstance(error, FencedError):
                self._why = str(error)
            if kind in (*REFUSALS, FENCED):
                log.warning("%s %s refused: %s", command, arguments, error)
            else:
                log.exception("%s %s failed", command, arguments)
            return _failure(number, kind, str(error))
        return {"id": number, "result": result}

    async def _run_beside(self, command: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """None: the command is for the work thread."""
        work = None if self._commands is None else self._commands.beside().get(command)
        if work is None:
            return None
        if command not in self._beside:
            self._beside[command] = ThreadPoolExecutor(1, thread_name_prefix=command)
        # Shielded, as what is on the work thread.
        found = asyncio.get_running_loop().run_in_executor(self._beside[command], partial(work, **arguments))
        return await asyncio.shield(found)

    def _run(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        assert self._commands is not None, "commands wait behind `start` on the same thread"
        known = self._commands.commands()
        if command not in known:
            raise ValueError(f"unknown command {command!r}; known are status, {', '.join(sorted(known))}")
        return known[command](**arguments)

    async def _on_thread(self, name: str, work: Callable[[], Any]) -> Any:
        def named() -> Any:
            self._busy = name
            try:
                return work()
            finally:
                self._busy = None

        self._pending += 1
        try:
            # Shielded: a client that goes away does not undo work, it only loses the answer.
            return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, named))
        finally:
            self._pending -= 1


def _failure(number: Any, kind: str, message: str) -> dict[str, Any]:
    return {"id": number, "error": {"type": kind, "message": message}}
