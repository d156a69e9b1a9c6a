"""A call that goes on at another cell: its first token where that cell finds the prefix's KV, and where it does not.

Two real servers with SmolLM2-135M's weights, float32, a core each. A prompt that neither knows goes to one (without);
that one leaves as a cell does (`flush_cache`: all copies are out); the same prompt goes to the other (with), and once
more (there already): what that takes less is the fetch. So every prefill is the baseline and the source at once, and
all are interleaved. Prompts are random ids.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from gyre.config import CellConfig, ServingConfig
from gyre.serving.client import EngineClient
from gyre.serving.kv import plan_kv
from gyre.serving.kv_pages import FolderUse
from gyre.serving.launch import EngineProcess

LENGTHS = (2048, 4096, 8100)
"""Tokens of a prompt; the model's context is 8,192."""

ANSWER = 32
SERVING = ServingConfig(max_running=4, kv_tokens=12288)


def main(rounds: int = 3) -> None:
    from benchmarks.trees.smollm2 import write

    logging.getLogger("httpx").setLevel(logging.WARNING)
    folder = Path(tempfile.mkdtemp(prefix="gyre-bench-kv-"))
    try:
        (folder / "policy").mkdir()
        write(folder / "policy")
        asyncio.run(_compare(folder, rounds))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _compare(folder: Path, rounds: int) -> None:
    policy = folder / "policy"
    cells = [CellConfig(name=f"c{i}", cpus=[i]) for i in range(2)]
    plan = plan_kv("bench", policy, 8192, SERVING, cells[0], folder)
    if plan is None:
        raise SystemExit("the estimate says that nothing should move here")
    print(
        f"a prefill of n tokens: {plan.prefill.base_s:.3f} + {plan.prefill.per_token_s:.2e} n + "
        f"{plan.prefill.per_pair_s:.2e} n²/2 s ({plan.prefill.source}); a fetch: {plan.fetch.fixed_s} + "
        f"{plan.fetch.per_token_s:.2e} n s; so prefixes of {plan.least_tokens} tokens and more move, through "
        f"{plan.folder.parent}"
    )
    use = FolderUse(plan.folder)
    engines = [EngineProcess(SERVING, c, folder / f"{c.name}.log", context=8192) for c in cells]
    try:
        for engine in engines:
            engine.kv = plan
            engine.start(policy)
            await engine.wait_ready()
        found = await _ping_pong(engines, rounds)
    finally:
        for engine in engines:
            engine.stop()
        use.close()
    table = Table(
        "prompt", "cached", "without: s", "estimated", "with: s", "there: s", "fetch: s", "estimated", "out: s",
        "ratio",
        title=f"first token at the receiving cell, medians of {rounds}",
    )  # fmt: skip
    for tokens, runs in found.items():
        a, b, there, out = (statistics.median(r[i] for r in runs) for i in range(4))
        ratios = sorted(r[0] / r[1] for r in runs)
        table.add_row(
            f"{tokens}", f"{runs[0][4]}", f"{a:.2f}", f"{plan.prefill.seconds(tokens):.2f}", f"{b:.3f}", f"{there:.3f}",
            f"{statistics.median(r[1] - r[2] for r in runs):.3f}", f"{plan.fetch.seconds(tokens):.3f}", f"{out:.3f}",
            f"{statistics.median(ratios):.1f}x ({ratios[0]:.1f} to {ratios[-1]:.1f})",
        )  # fmt: skip
    Console(width=130).print(table)


async def _ping_pong(
    engines: list[EngineProcess], rounds: int
) -> dict[int, list[tuple[float, float, float, float, int]]]:
    rng = random.Random(0)
    found: dict[int, list[tuple[float, float, float, float, int]]] = {n: [] for n in LENGTHS}
    for engine in engines:
        await first_token(engine.url, [rng.randrange(49000) for _ in range(64)])  # what is made at first use is made
    for i in range(rounds):
        for tokens in LENGTHS:
            here, there = engines[i % 2], engines[1 - i % 2]
            prompt = [rng.randrange(49000) for _ in range(tokens)]
            without, cached = await first_token(here.url, prompt)
            assert cached == 0
            async with EngineClient(here.url) as client:
                await client.wait_empty(60)
                began = time.perf_counter()
                await client.flush_cache()
                out = time.perf_counter() - began
            moved, cached = await first_token(there.url, prompt)
            again, _ = await first_token(there.url, prompt)
            found[tokens].append((without, moved, again, out, cached))
            print(
                f"{tokens}: {without:.2f} s without, {moved:.3f} s with ({cached} cached), {again:.3f} s there, "
                f"out in {out:.3f} s"
            )
    return found


async def first_token(url: str, prompt: list[int]) -> tuple[float, int]:
    """Seconds until the first token, and how many of the prompt's were cached; the answer is read to its end."""
    body: dict[str, Any] = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": ANSWER, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "stream": True,
        "extra_key": "v0",
    }
    first, cached, began = 0.0, 0, time.perf_counter()
    async with (
        httpx.AsyncClient(base_url=url, timeout=600) as http,
        http.stream("POST", "/generate", json=body) as stream,
    ):
        async for line in stream.aiter_lines():
            if line.startswith("data: {") and not first:
                first = time.perf_counter() - began
                cached = int(httpx.Response(200, text=line.removeprefix("data: ")).json()["meta_info"]["cached_tokens"])
    return first, cached
