"""One unbroken answer from whichever cells serve: what an engine gave before it left is kept, and goes on elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from gyre.gateway.engine import Chunk, EngineClient, EngineGone, EngineRequest
from gyre.gateway.metrics import Metrics
from gyre.gateway.prompt_text import text_of
from gyre.gateway.routing import Lease, Router

log = logging.getLogger(__name__)

# Seconds that an aborted engine has to hand over its last tokens.
ABORT_GRACE_S = 1.0


@dataclass(slots=True)
class Ask:
    """What is to be generated."""

    rollout_id: str
    min_version: int
    prompt: bytes
    """Its ids as text, comma-separated."""
    prompt_tokens: int
    max_tokens: int
    temperature: float
    top_p: float
    stop_ids: list[int]
    stopped: Callable[[list[int]], int | None] | None
    """How many of the ids to keep, once they spell one of the harness's stop strings. Engines see token ids only."""
    preferred: str | None


@dataclass(slots=True)
class Answer:
    """The tokens so far; complete once `finish` is set ('stop' or 'length')."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)
    """[policy version, start, end] over `ids`, without gaps."""
    cells: list[str] = field(default_factory=list)
    finish: str | None = None
    cached_tokens: int | None = None
    routed_at: dt.datetime | None = None
    first_token_at: dt.datetime | None = None
    cached_here: int = 0
    """Of the newest engine's prompt."""
    waited: float = 0.0
    """Seconds without a cell."""
    generating: float = 0.0
    """Seconds with one."""

    def add_spans(self, offset: int, spans: list[tuple[str, int, int]], fallback: int) -> None:
        """Replace the spans from `offset` on by one engine's, which count from its own first token."""
        while self.spans and self.spans[-1][1] >= offset:
            self.spans.pop()
        if self.spans:
            self.spans[-1][2] = min(self.spans[-1][2], offset)
        for name, start, end in spans:
            version = int(name) if name.isdigit() else fallback
            start, end = start + offset, min(end + offset, len(self.ids))
            if end <= start:
                continue
            if self.spans and self.spans[-1][0] == version and self.spans[-1][2] == start:
                self.spans[-1][2] = end
            else:
                self.spans.append([version, start, end])

    def cut(self, keep: int) -> None:
        """Drop all tokens after the first `keep`."""
        del self.ids[keep:], self.logprobs[keep:]
        self.spans = [[v, start, min(end, keep)] for v, start, end in self.spans if start < keep]


async def generate(ask: Ask, answer: Answer, router: Router, engines: EngineClient, metrics: Metrics) -> None:
    """Fill `answer` until it is complete. On cancellation it holds what had come so far, and the engine is aborted.

    Raises EngineRefused and EngineBroken; everything else that can happen to an engine only takes time.
    """
    while answer.finish is None:
        left = ask.max_tokens - len(answer.ids)
        if left <= 0:
            answer.finish = "length"
            return
        waits = time.perf_counter()
        lease = await router.acquire(
            ask.rollout_id, ask.min_version, ask.preferred, tokens=ask.prompt_tokens + ask.max_tokens
        )
        before, began = len(answer.ids), time.perf_counter()
        answer.waited += began - waits
        answer.cached_here = 0
        try:
            await _one_engine(ask, answer, lease, left, router, engines)
            if answer.finish is None and len(answer.ids) == before:
                router.failed(lease)  # an engine that aborts at once is not asked again at once
            if answer.finish is None:
                metrics.rerouted.labels(lease.cell, "revoked" if lease.revoked.is_set() else "aborted").inc()
        except EngineGone as error:
            pause = router.failed(lease)
            reason = "silence" if str(error) == "silence" else "gone"
            metrics.rerouted.labels(lease.cell, reason).inc()
            log.warning(
                "cell %s is gone (%s) after %d tokens of %s; it is left alone for %.2f s",
                lease.cell, error, len(answer.ids), ask.rollout_id, pause,
            )  # fmt: skip
        finally:
            router.release(lease)
            took, tokens = time.perf_counter() - began, metrics.cell_tokens
            answer.generating += took
            metrics.cell_seconds.labels(lease.cell).observe(took)
            tokens.labels(lease.cell, "prompt").inc(ask.prompt_tokens + before)
            tokens.labels(lease.cell, "cached").inc(answer.cached_here)
            tokens.labels(lease.cell, "generated").inc(len(answer.ids) - before)
        if answer.ids and answer.ids[-1] in ask.stop_ids:
            answer.finish = "stop"  # its last word arrived, its finish did not


async def _one_engine(ask: Ask, answer: Answer, lease: Lease, left: int, router: Router, engines: EngineClient) -> None:
    """Take what one engine gives, until it finishes, is aborted, or its lease is revoked."""
    offset = len(answer.ids)
    sampling: dict[str, Any] = {
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "max_new_tokens": left,
        "stop_token_ids": ask.stop_ids,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    prompt = ask.prompt
    if answer.ids:
        prompt = b"%b,%b" % (prompt, text_of(np.asarray(answer.ids, np.int32)))
    request = EngineRequest(uuid.uuid4().hex, prompt, sampling, f"v{lease.version}", ask.top_p < 1)
    if answer.routed_at is None:
        answer.routed_at = _now()
    if not answer.cells or answer.cells[-1] != lease.cell:
        answer.cells.append(lease.cell)

    def take(chunk: Chunk) -> None:
        if chunk.ids or (chunk.finish is not None and chunk.finish["type"] in ("stop", "length")):
            router.succeeded(lease)
        if chunk.ids and answer.first_token_at is None:
            answer.first_token_at = _now()
        answer.cached_here = answer.cached_here or chunk.cached_tokens
        if answer.cached_tokens is None:
            answer.cached_tokens = chunk.cached_tokens
        answer.ids += chunk.ids
        answer.logprobs += chunk.logprobs
        answer.add_spans(offset, chunk.spans, lease.version)
        if chunk.finish is not None and chunk.finish["type"] in ("stop", "length"):
            answer.finish = chunk.finish["type"]
        if ask.stopped is not None and (keep := ask.stopped(answer.ids)) is not None:
            answer.cut(keep)
            answer.finish = "stop"

    # The generator is finished by hand in every case, so that the connection never outlives the call.
    chunks = cast(AsyncGenerator[Chunk], engines.generate(lease.url, request))
    revoked = asyncio.create_task(lease.revoked.wait())
    reader = asyncio.create_task(_read(chunks, take, answer))
    try:
        await asyncio.wait({reader, revoked}, return_when=asyncio.FIRST_COMPLETED)
        if not reader.done():
            await _stop(engines, lease.url, request.rid, reader)
        if reader.done():
            reader.result()
            if ask.stopped is not None:  # a stop string ends the answer before the engine does
                await engines.abort(lease.url, request.rid)
    except EngineGone:
        engines.abort_soon(lease.url, request.rid)  # it may only be slow, and still generate for nobody
        raise
    except asyncio.CancelledError:
        await asyncio.shield(_stop(engines, lease.url, request.rid, reader))
        raise
    finally:
        revoked.cancel()
        if not reader.done():
            reader.cancel()
        await asyncio.wait({reader})
        if not reader.cancelled() and (error := reader.exception()) is not None:
            log.debug("engine of %s: %s", ask.rollout_id, error)


async def _read(chunks: AsyncGenerator[Chunk], take: Callable[[Chunk], None], answer: Answer) -> None:
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            take(chunk)
            if answer.finish is not None:
                return


async def _stop(engines: EngineClient, url: str, rid: str, reader: asyncio.Task[None]) -> None:
    """Abort a request and take its last tokens, where the engine hands them over in time."""
    # Twice: an engine forgets an abort that overtakes its request.
    for grace in (ABORT_GRACE_S / 4, ABORT_GRACE_S * 3 / 4):
        await engines.abort(url, rid)
        await asyncio.wait({reader}, timeout=grace)
        if reader.done():
            return


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)
