"""Client of one SGLang server's `/generate` and `/abort_request`: token ids in, token ids and log-probs out."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from gyre.ports import notice_loss

# Tokens that the engine lets pile up before it sends a chunk; the first token comes at once.
STREAM_INTERVAL = 16
# Seconds for the end of a stream to follow its last chunk. Then the connection serves the next request; one that is
# closed instead looks to the engine like a client that left.
STREAM_END_S = 0.25
# Seconds that an idle connection is kept: less than the engine's own 5, so that none is used that it just closes.
KEEP_ALIVE_S = 4.0


# SGLang gives the log-probs of a truncated distribution only for a finite support (`--sampling-mask-max-tokens`, 4096).
NUCLEUS_TOP_K = 4000


class EngineGone(Exception):
    """The engine died, fell silent or cannot serve now: the call goes on elsewhere. The message says which."""


class EngineRefused(Exception):
    """The engine will never serve this request (a 4xx)."""


class EngineBroken(Exception):
    """The engine's answer contradicts itself: a bug that must not be trained on."""


@dataclass(slots=True)
class Chunk:
    """What arrived since the chunk before. `spans`, [[version, start, end], ...], cover the whole answer so far."""

    ids: list[int]
    logprobs: list[float]
    spans: list[tuple[str, int, int]]
    finish: dict[str, Any] | None
    cached_tokens: int


@dataclass(slots=True)
class EngineRequest:
    """One `/generate` request."""

    rid: str
    prompt: bytes
    """Ids, comma-separated."""
    sampling: dict[str, Any]
    cache_key: str
    """Separates prefix caches: KV of other weights is not reused."""
    behaviour_mask: bool = False
    """Ask for log-probs of the truncated distribution (top-p < 1) instead of the full softmax."""

    def body(self) -> bytes:
        """The JSON body."""
        fields: dict[str, Any] = {
            "rid": self.rid,
            "sampling_params": {**self.sampling, "stream_interval": STREAM_INTERVAL},
            "return_logprob": True,
            "stream": True,
            "extra_key": self.cache_key,
        }
        if self.behaviour_mask:
            fields["return_sampling_mask"] = True
            fields["sampling_params"]["top_k"] = NUCLEUS_TOP_K
        # The prompt may be megabytes: it is copied once, and no serialiser looks through it.
        return b'{"input_ids":[%b],%b' % (self.prompt, orjson.dumps(fields)[1:])


@dataclass(slots=True)
class _Assembler:
    """Turns SGLang's messages, cumulative or incremental as the server is set, into chunks."""

    masked: bool
    count: int = 0
    spans: list[tuple[str, int, int]] = field(default_factory=list)

    def chunk(self, message: dict[str, Any]) -> Chunk:
        if (error := message.get("error")) is not None:
            text = error.get("message", str(error)) if isinstance(error, dict) else str(error)
            raise EngineRefused(text)
        meta = message["meta_info"]
        finish = meta["finish_reason"]
        if finish is not None and finish["type"] == "abort" and (status := finish.get("status_code")) is not None:
            text = str(finish.get("message", "no message"))
            raise EngineRefused(text) if 400 <= int(status) < 500 and int(status) != 429 else EngineGone(text)
        total = int(meta["completion_tokens"])
        try:
            ids, logprobs = self._new(message["output_ids"], meta, total)
        except EngineBroken:
            if finish is None or finish["type"] != "abort":
                raise
            # SGLang repeats its last token when it aborts a request that waits (0.5.23, _handle_abort_req). What does
            # not add up is left out: the call goes on from the tokens before, and samples these anew.
            return Chunk([], [], self.spans, finish, 0)
        self.count = total
        if (spans := meta.get("weight_versions")) is not None:
            self.spans = [(str(s["version"]), int(s["start"]), int(s["end"])) for s in spans]
        elif total:
            self.spans = [(str(meta.get("weight_version")), 0, total)]
        return Chunk(ids, logprobs, self.spans, finish, int(meta.get("cached_tokens") or 0))

    def _new(self, ids: list[int], meta: dict[str, Any], total: int) -> tuple[list[int], list[float]]:
        """The ids and log-probs that were not there before. Raises EngineBroken where they do not add up."""
        logprobs = meta.get("output_token_sampling_logprobs" if self.masked else "output_token_logprobs") or []
        if self.count + len(ids) != total:  # cumulative: the whole answer, perhaps more than `total`, in every message
            if len(ids) < total or total < self.count:
                raise EngineBroken(f"{len(ids)} ids came, of {total} in all, after {self.count}")
            ids = ids[self.count : total]
            logprobs = logprobs[self.count : total]
        elif len(logprobs) == total:  # the log-probs are whole where the ids are not
            logprobs = logprobs[self.count :]
        if len(logprobs) != len(ids):
            raise EngineBroken(f"{len(ids)} ids came with {len(logprobs)} log-probs")
        if not self.masked:
            for token, entry in zip(ids, logprobs, strict=True):
                if entry[1] != token:
                    raise EngineBroken(f"the log-prob of token {entry[1]} stands at token {token}")
            logprobs = [entry[0] for entry in logprobs]
        for token, value in zip(ids, logprobs, strict=True):
            if not isinstance(value, (float, int)):
                raise EngineBroken(f"the log-prob of token {token} is {value!r}")
        return ids, logprobs


class EngineClient:
    """HTTP client of all engines. `silence_s`: seconds without a byte after which an engine counts as gone."""

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._http: aiohttp.ClientSession | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, socket_factory=_watched),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            )
        return self._http

    async def close(self) -> None:
        """Close all connections."""
        for task in self._aborts:
            task.cancel()
        if self._http is not None:
            await self._http.close()

    async def generate(self, url: str, request: EngineRequest) -> AsyncIterator[Chunk]:
        """Stream the answer to `request`; the last chunk has `finish`.

        Raises EngineGone, EngineRefused, EngineBroken. Closing the iterator closes the connection.
        """
        assembler = _Assembler(request.behaviour_mask)
        try:
            async with asyncio.timeout(self.silence_s):
                response = await self._session().post(
                    f"{url}/generate", data=request.body(), headers={"Content-Type": "application/json"}
                )
            try:
                if response.status != 200:
                    text = (await response.text())[:500]
                    if 400 <= response.status < 500 and response.status not in (408, 429):
                        raise EngineRefused(f"HTTP {response.status}: {text}")
                    raise EngineGone(f"HTTP {response.status}: {text}")
                async for event in self._events(response):
                    chunk = assembler.chunk(event)
                    if chunk.finish is not None:
                        await _read_to_the_end(response)
                    yield chunk
                    if chunk.finish is not None:
                        return
                raise EngineGone("the stream ended before the answer did")
            finally:
                response.close()
        except TimeoutError as error:
            raise EngineGone("silence") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineGone(f"connection: {type(error).__name__}") from error

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
        buffer = b""
        while True:
            async with asyncio.timeout(self.silence_s):
                data = await response.content.readany()
            if not data:
                return
            buffer += data
            *events, buffer = buffer.split(b"\n\n")
            for event in events:
                payload = event.removeprefix(b"data: ")
                if payload == b"[DONE]":
                    return
                try:
                    yield orjson.loads(payload)
                except orjson.JSONDecodeError as error:
                    raise EngineBroken(f"not JSON in the stream: {payload[:200]!r}") from error

    def abort_soon(self, url: str, rid: str) -> None:
        """`abort`, without waiting for it."""
        task = asyncio.create_task(self.abort(url, rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def abort(self, url: str, rid: str) -> None:
        """Ask the engine to stop `rid`; an engine that cannot hear it is not served from any more anyway."""
        with contextlib.suppress(aiohttp.ClientError, ConnectionError, TimeoutError):
            async with asyncio.timeout(2.0):
                response = await self._session().post(f"{url}/abort_request", json={"rid": rid})
                response.close()


def _watched(address: aiohttp.AddrInfoType) -> socket.socket:
    """A connection that fails where its network carries nothing: sooner than an engine that only thinks is given up."""
    connection = socket.socket(*address[:3])
    notice_loss(connection)
    return connection


async def _read_to_the_end(response: aiohttp.ClientResponse) -> None:
    with contextlib.suppress(aiohttp.ClientError, ConnectionError, TimeoutError):
        async with asyncio.timeout(STREAM_END_S):
            await response.read()
