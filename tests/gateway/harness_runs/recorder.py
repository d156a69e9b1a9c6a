"""A reverse proxy between a harness and the gateway that keeps every byte of both directions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Self

import aiohttp
from aiohttp import web

from gyre.gateway.calls import hash_of


@dataclass
class Exchange:
    """One HTTP request and what became of it. `status` 0: no answer; `whole`: the client got all of it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int = 0
    answer: bytearray = field(default_factory=bytearray)
    whole: bool = False

    def hash(self, agent: str) -> str:
        """What `calls.request_hash` has of this body and of the agent that sent it (`calls.agent`)."""
        return hash_of(self.body, agent)


class Recorder:
    """Forwards to `target` (a base URL), which may change at any time."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.exchanges: list[Exchange] = []
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False, connector=aiohttp.TCPConnector(limit=0)
        )
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{tail:.*}", self._forward)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None and self._http is not None
        await self._runner.cleanup()
        await self._http.close()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        assert self._http is not None
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "accept-encoding")}
        lower = {k.lower(): v for k, v in headers.items()}
        seen = Exchange(request.method, request.rel_url.raw_path, lower, body)
        self.exchanges.append(seen)
        try:
            upstream = await self._http.request(
                request.method, f"{self.target}{request.rel_url.raw_path_qs}", data=body, headers=headers
            )
        except aiohttp.ClientError:  # the gateway is away: so is the connection
            self._cut(request)
            raise asyncio.CancelledError from None
        try:
            kept = {k: v for k, v in upstream.headers.items() if k.lower() not in ("transfer-encoding", "connection")}
            answer = web.StreamResponse(status=upstream.status, headers=kept)
            seen.status = upstream.status
            await answer.prepare(request)
            async for piece in upstream.content.iter_any():
                seen.answer += piece
                await answer.write(piece)
            await answer.write_eof()
            seen.whole = True
            return answer
        except (aiohttp.ClientError, ConnectionError):
            self._cut(request)
            raise asyncio.CancelledError from None
        finally:
            upstream.close()

    @staticmethod
    def _cut(request: web.Request) -> None:
        if request.transport is not None:
            request.transport.abort()
