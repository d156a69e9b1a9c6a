"""Two real servers: what one computed the other fetches, of its own policy version alone, and never what is broken."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gyre.config import CellConfig, ServingConfig
from gyre.serving.client import EngineClient
from gyre.serving.kv import KvPlan
from gyre.serving.kv_cost import PAGE_TOKENS
from gyre.serving.launch import EngineProcess
from tests.serving.calls import generate, until_running
from tests.serving.tiny_policy import make_weights, write_policy

SERVING = ServingConfig(max_running=8, kv_tokens=16384)
THRESHOLD = 64
TOKENS = 1200


def prompt(seed: int) -> list[int]:
    return [(i * 37 + seed * 101 + i * i % 11) % 500 + 5 for i in range(TOKENS)]


@dataclass
class Cells:
    folder: Path
    leaving: EngineProcess
    receiving: EngineProcess
    log: Path
    """Of the receiving cell."""
    answered: dict[int, list[int]]
    """What the leaving cell had generated, by prompt."""


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cells]:
    """The leaving cell has served three prompts and has left; the receiving one has served nothing."""
    base = tmp_path_factory.mktemp("kv")
    policy = write_policy(base / "policy", seed=0)
    plan = KvPlan(base / "pages", budget=1 << 28, least_tokens=THRESHOLD, patience_s_per_1k=60.0)
    engines = [EngineProcess(SERVING, CellConfig(name=n), base / f"{n}.log", context=2048) for n in ("a", "b")]
    cells = Cells(plan.folder, *engines, base / "b.log", {})
    try:
        for engine in engines:
            engine.kv = plan
        asyncio.run(_serve_and_leave(cells, policy))
        cells.leaving.stop(grace_s=0)  # what it handed over does not need it
        cells.receiving.start(policy, version=0)
        asyncio.run(cells.receiving.wait_ready())
        yield cells
    finally:
        for engine in engines:
            engine.stop()


async def _serve_and_leave(cells: Cells, policy: Path) -> None:
    cells.leaving.start(policy, version=0)
    await cells.leaving.wait_ready()
    for seed in range(3):
        answer = await generate(cells.leaving.url, prompt(seed), 16, extra_key="v0")
        assert answer["meta_info"]["cached_tokens"] == 0
        cells.answered[seed] = answer["output_ids"]
    async with EngineClient(cells.leaving.url) as client:
        assert await client.wait_empty(30)
        await client.flush_cache()
        await client.pause("abort")
        await client.release_memory()


def from_storage(answer: dict[str, Any]) -> int:
    details = answer["meta_info"].get("cached_tokens_details") or {}
    return int(details.get("storage", 0))


def pages(url: str) -> dict[str, int]:
    """The server's counters."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    found = re.findall(r'^gyre_kv_pages_total\{[^}]*result="(\w+)"[^}]*\} ([\d.e+]+)$', text, re.MULTILINE)
    return {name: round(float(value)) for name, value in found}


async def ask(url: str, ids: list[int], key: str) -> dict[str, Any]:
    """One token, with the log-prob of every token of the vocabulary."""
    return await generate(url, ids, 1, extra_key=key, top_logprobs_num=512)


def distribution(answer: dict[str, Any]) -> list[float]:
    entries = answer["meta_info"]["output_top_logprobs"][0]
    assert len(entries) == 512
    return [value for _, value in sorted((entry[1], entry[0]) for entry in entries)]


async def difference(url: str, ids: list[int], answer: dict[str, Any]) -> float:
    """Of log-probs to those of the same call without any cache, at most."""
    fresh = await ask(url, ids, f"fresh {time.monotonic()}")
    assert fresh["meta_info"]["cached_tokens"] == 0
    return max(abs(a - b) for a, b in zip(distribution(answer), distribution(fresh), strict=True))


async def test_the_receiving_cells_first_call_finds_the_prefix(cells: Cells) -> None:
    url, ids = cells.receiving.url, [*prompt(0), *cells.answered[0]]
    answer = await ask(url, ids, "v0")
    # All whole pages of what was computed; the last generated token's keys and values were never needed there.
    assert answer["meta_info"]["cached_tokens"] == (len(ids) - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert from_storage(answer) == answer["meta_info"]["cached_tokens"]
    assert await difference(url, ids, answer) < 1e-4
    assert pages(url)["found"] == from_storage(answer) // PAGE_TOKENS


async def test_a_prefix_below_the_threshold_is_computed(cells: Cells) -> None:
    answer = await generate(cells.receiving.url, prompt(1)[: THRESHOLD - 8], 1, extra_key="v0")
    assert answer["meta_info"]["cached_tokens"] == 0


async def test_a_damaged_page_and_what_follows_it_are_computed(cells: Cells) -> None:
    url, before = cells.receiving.url, pages(cells.receiving.url)
    stored = list((cells.folder / "v0").iterdir())
    for page in stored:
        data = bytearray(page.read_bytes())
        data[-1] ^= 255
        page.write_bytes(data)
    answer = await ask(url, prompt(1), "v0")
    assert from_storage(answer) == 0
    assert await difference(url, prompt(1), answer) < 1e-4
    assert pages(url)["corrupt"] > before.get("corrupt", 0)
    assert "damaged" in cells.log.read_text(encoding="utf-8")


async def test_a_storage_that_is_gone_is_a_miss(cells: Cells) -> None:
    cells.folder.rename(cells.folder.with_name("gone"))  # at once: servers may be writing
    answer = await ask(cells.receiving.url, prompt(2), "v0")
    assert answer["meta_info"]["cached_tokens"] == 0
    assert await difference(cells.receiving.url, prompt(2), answer) < 1e-4


async def test_keys_and_values_of_other_weights_are_never_used(cells: Cells) -> None:
    url, ids = cells.receiving.url, prompt(3)
    async with EngineClient(url) as client:
        await generate(url, ids, 1, extra_key="same")
        live = [asyncio.create_task(generate(url, [*prompt(4 + i)], 700, extra_key="same")) for i in range(3)]
        await until_running(client, 3)
        await client.update_weights(make_weights(1), 1)
        stale = cells.folder / "v0"
        assert len(list(stale.iterdir())) >= TOKENS // PAGE_TOKENS  # all its pages are there, under the same names
        answer = await ask(url, ids, "same")
        assert answer["meta_info"]["cached_tokens"] == 0
        assert await difference(url, ids, answer) < 1e-4
        for call in live:
            assert [s["version"] for s in (await call)["meta_info"]["weight_versions"]] == ["0", "1"]
        assert await client.wait_empty(30)
        await client.flush_cache()
        again = await ask(url, ids, "same")
        assert from_storage(again) == (TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS  # its own are found
        assert distribution(again) == pytest.approx(distribution(answer), abs=1e-4)
        # The version in the key is what kept the old ones out: in the new version's place they would be used.
        await client.flush_cache()
        (cells.folder / "v1").rename(cells.folder / "gone")
        stale.rename(cells.folder / "v1")
        wrong = await ask(url, ids, "same")
        assert from_storage(wrong) > 0
        assert await difference(url, ids, wrong) > 0.1
