"""A TCP proxy in front of a real server, for faults that the server itself cannot be asked for."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self
from urllib.parse import urlsplit

from gyre.ports import free_port


class Proxy:
    """Forwards to one address. `hold_after`: bytes of an answer after which nothing more comes, ever; None: all comes.

    It is asked once a connection.
    """

    def __init__(self, target: str, hold_after: int | None = None) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname or "127.0.0.1", parts.port)
        self._scheme = parts.scheme
        self.hold_after = hold_after
        self.held = asyncio.Event()
        self.most = 0
        """Bytes of the longest answer so far, of one connection."""
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.up()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.down()

    async def up(self) -> None:
        """Listen, on the same port as before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def down(self) -> None:
        """Stop listening and cut every connection."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            there, back = await asyncio.open_connection(*self._target)
            self._open |= {writer, back}
            await asyncio.gather(self._pump(reader, back), self._answer(there, writer, self.hold_after))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for w in (writer,):
                w.transport.abort()

    @staticmethod
    async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
        with contextlib.suppress(OSError):
            sink.write_eof()

    async def _answer(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, hold_after: int | None) -> None:
        seen = 0
        while data := await source.read(65536):
            seen += len(data)
            if hold_after is not None and seen > hold_after:
                self.held.set()
                continue
            sink.write(data)
            await sink.drain()
            self.most = max(self.most, seen)
        with contextlib.suppress(OSError):
            sink.write_eof()
