"""A connection that can be cut and healed, as a network does it: bytes wait, nothing is closed."""

from __future__ import annotations

import asyncio
import contextlib


class Link:
    """Listens at `address` and forwards to a target while it is whole."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: list[asyncio.StreamWriter] = []
        self.address = ""

    async def __aenter__(self) -> Link:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        self._server.close()

    def cut(self) -> None:
        """From now on nothing goes through, in either direction."""
        self._whole.clear()

    def drop(self) -> None:
        """Cut, and what was connected ends: so it looks from afar when somebody is killed."""
        self.cut()
        for end in self._ends:
            end.transport.abort()

    def heal(self) -> None:
        """What waited goes through, and all that comes."""
        self._whole.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._whole.wait()
        there, back = await asyncio.open_connection(*self._target)
        self._ends += [writer, back]
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self._whole.wait()
                sink.write(data)
                await sink.drain()
        sink.close()
