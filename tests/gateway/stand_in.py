"""A stand-in for an engine that says the same at once, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import orjson
from aiohttp import web

from tests.gateway.markov import tokenizer

MADE = tokenizer()


class StandIn:
    """`/generate` and `/abort_request` of SGLang; the answer is `text` after `delay` seconds."""

    def __init__(self) -> None:
        self.text = "done"
        self.delay = 0.0
        self.prompts: list[list[int]] = []
        self.aborted: list[str] = []
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        asked: dict[str, Any] = orjson.loads(await http.read())
        self.prompts.append(asked["input_ids"])
        await asyncio.sleep(self.delay)
        ids = MADE.encode(f"{self.text}<|im_end|>", add_special_tokens=False).ids
        meta = {
            "finish_reason": {"type": "stop"},
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": "3",
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(http)
        await answer.write(b"data: " + orjson.dumps({"output_ids": ids, "meta_info": meta}) + b"\n\ndata: [DONE]\n\n")
        return answer

    async def _abort(self, http: web.Request) -> web.Response:
        self.aborted.append(orjson.loads(await http.read())["rid"])
        return web.Response()
