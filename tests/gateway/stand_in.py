"""A stand-in for an engine that says the same at once, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Self

import orjson
from aiohttp import web

from tests.gateway.markov import tokenizer

MADE = tokenizer()


class StandIn:
    """`/generate` and `/abort_request` of SGLang. Every answer is `text`, `delay` seconds before its first token and
    `step` before each; a prompt that holds its beginning already gets the rest. While `gate` is not set, none begins.
    After `silent_after` tokens of an answer nothing more comes; after `hold_after` of a request, nothing until it is
    aborted.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self.text = "done"
        self.gate = asyncio.Event()
        self.gate.set()
        self.delay = 0.0
        self.step = 0.0
        self.silent_after: int | None = None
        self.hold_after: int | None = None
        self.version = 3
        self.prompts: list[list[int]] = []
        self.aborted: list[str] = []
        self.running: dict[str, asyncio.Event] = {}
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0)
        await site.start()
        self.url = f"http://{self._host}:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        asked: dict[str, Any] = orjson.loads(await http.read())
        prompt: list[int] = asked["input_ids"]
        self.prompts.append(prompt)
        whole = MADE.encode(f"{self.text}<|im_end|>", add_special_tokens=False).ids
        done = next(n for n in range(len(whole), -1, -1) if prompt[len(prompt) - n :] == whole[:n])
        ids = whole[done:]
        stop = self.running[asked["rid"]] = asyncio.Event()
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(http)
        try:
            await self.gate.wait()
            await self._wait(stop, self.delay)
            given = 0
            while given < len(ids) and not stop.is_set():
                if self.silent_after is not None and done + given >= self.silent_after:
                    await stop.wait()
                    return answer
                if given == self.hold_after:
                    await stop.wait()
                    break
                await self._wait(stop, self.step)
                bounds = (self.silent_after, self.hold_after)
                take = 1 if self.step or bounds != (None, None) else len(ids)
                given = min(len(ids), given + take)
                await answer.write(self._event(ids[given - take : given], given, "stop" if given == len(ids) else None))
            if given < len(ids):
                await answer.write(self._event([], given, "abort"))
            await answer.write(b"data: [DONE]\n\n")
        finally:
            del self.running[asked["rid"]]
        return answer

    @staticmethod
    async def _wait(stop: asyncio.Event, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), seconds or 0.000001)

    def _event(self, ids: list[int], total: int, finish: str | None) -> bytes:
        meta = {
            "finish_reason": None if finish is None else {"type": finish},
            "completion_tokens": total,
            "cached_tokens": 0,
            "weight_version": str(self.version),
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        return b"data: " + orjson.dumps({"output_ids": ids, "meta_info": meta}) + b"\n\n"

    async def _abort(self, http: web.Request) -> web.Response:
        rid = orjson.loads(await http.read())["rid"]
        self.aborted.append(rid)
        if rid in self.running:
            self.running[rid].set()
        return web.Response()
