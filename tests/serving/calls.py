"""Requests to a server as the gateway sends them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from gyre.serving.client import EngineClient


async def generate(url: str, ids: list[int], n: int, temperature: float = 1.0, **body: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": n, "temperature": temperature, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        answer = await http.post(
            "/generate", json={"input_ids": ids, "sampling_params": sampling, "return_logprob": True, **body}
        )
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


async def begun(url: str, ids: list[int], n: int, **more: Any) -> asyncio.Task[dict[str, Any]]:
    """A call whose first token has come, and what `generate` would give of it. One that merely runs may wait yet."""
    first = asyncio.Event()

    async def stream() -> dict[str, Any]:
        sampling = {"max_new_tokens": n, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "stream": True, **more}
        found: list[int] = []
        entries: list[Any] = []
        async with (
            httpx.AsyncClient(base_url=url, timeout=120) as http,
            http.stream("POST", "/generate", json=body) as lines,
        ):
            async for line in lines.aiter_lines():
                if line.startswith("data: {"):
                    message = json.loads(line.removeprefix("data: "))
                    meta: dict[str, Any] = message["meta_info"]
                    found += message["output_ids"]
                    entries += meta["output_token_logprobs"]
                    first.set()
        return {"output_ids": found, "meta_info": {**meta, "output_token_logprobs": entries}}

    call, waits = asyncio.create_task(stream()), asyncio.create_task(first.wait())
    await asyncio.wait({call, waits}, return_when=asyncio.FIRST_COMPLETED)
    if not first.is_set():
        waits.cancel()
        raise AssertionError(f"it ended without a token: {await call}")
    return call


def logprobs(answer: dict[str, Any], what: str = "output_token_logprobs") -> list[float]:
    return [entry[0] for entry in answer["meta_info"][what]]


async def scored(url: str, ids: list[int]) -> list[float]:
    """Log-prob of each token of `ids` but the first, by a prefill alone."""
    return logprobs(await generate(url, ids, 1, logprob_start_len=0), "input_token_logprobs")[1:]


async def until_running(client: EngineClient, n: int) -> None:
    for _ in range(1000):
        if await client.running_requests() >= n:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"fewer than {n} requests run")
