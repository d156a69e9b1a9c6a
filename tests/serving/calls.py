"""Requests to a server as the gateway sends them."""

from __future__ import annotations

import asyncio
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
