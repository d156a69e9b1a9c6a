"""Two real servers: what one computed the other fetches, of its own policy version alone, and never what is broken."""

from __future__ import annotations

import asyncio
import re
import shutil
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
from gyre.serving.kv_cost import PAGE_TOKENS, FetchCost, PrefillCost
from gyre.serving.kv_pages import HEADER, PageFolder
from gyre.serving.launch import EngineProcess
from tests.serving.calls import begun, generate
from tests.serving.tiny_policy import make_weights, write_policy

SERVING = ServingConfig(max_running=8, kv_tokens=6144)
THRESHOLD = 64
TOKENS = 1200
PREFILL = PrefillCost(0.0, 1e-3, 0.0, True, "a guess")
CROWD = range(10, 14)
"""Prompts that come to the receiving cell at once."""
FREE, DEAR = FetchCost(0.0, 0.0), FetchCost(0.0, 3600.0)


def prompt(seed: int) -> list[int]:
    return [(i * 37 + seed * 101 + i * i % 11) % 500 + 5 for i in range(TOKENS)]


@dataclass
class Cells:
    folder: Path
    leaving: EngineProcess
    receiving: EngineProcess
    policy: Path
    logs: tuple[Path, Path]
    answered: dict[int, list[int]]
    """What the leaving cell had generated, by prompt."""


def plan_of(folder: Path, fetch: FetchCost) -> KvPlan:
    return KvPlan(folder, 1 << 28, THRESHOLD, 60.0, PREFILL, fetch)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cells]:
    """The leaving cell has served some prompts and has left; the receiving one has served nothing."""
    base = tmp_path_factory.mktemp("kv")
    policy = write_policy(base / "policy", seed=0)
    plan = plan_of(base / "pages", FREE)
    logs = base / "a.log", base / "b.log"
    leaving, receiving = engines = [EngineProcess(SERVING, CellConfig(name=x.stem), x, context=2048) for x in logs]
    cells = Cells(plan.folder, leaving, receiving, policy, logs, {})
    try:
        for engine in engines:
            engine.kv = plan
        asyncio.run(_serve_and_leave(cells))
        cells.leaving.stop(grace_s=0)  # what it handed over does not need it
        cells.receiving.start(policy, version=0)
        asyncio.run(cells.receiving.wait_ready())
        yield cells
    finally:
        for engine in engines:
            engine.stop()


async def _serve_and_leave(cells: Cells) -> None:
    cells.leaving.start(cells.policy, version=0)
    await cells.leaving.wait_ready()
    for seed in (*range(3), *CROWD):
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
    return counted(url, "pages")


def counted(url: str, what: str) -> dict[str, int]:
    text = httpx.get(f"{url}/metrics", timeout=60).text
    found = re.findall(rf'^gyre_kv_{what}_total\{{[^}}]*"(\w+)"\}} ([\d.e+]+)$', text, re.MULTILINE)
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
    assert counted(url, "decisions") == {"fetch": 1}
    said = cells.logs[1].read_text(encoding="utf-8")
    assert f"kv: fetched: {from_storage(answer)} of {from_storage(answer)} tokens move in 0.000 s, which saves" in said


async def test_a_prefix_below_the_threshold_is_computed(cells: Cells) -> None:
    answer = await generate(cells.receiving.url, prompt(1)[: THRESHOLD - 8], 1, extra_key="v0")
    assert answer["meta_info"]["cached_tokens"] == 0


async def test_all_calls_of_a_cell_find_their_prefixes_in_one_whose_cache_is_full(cells: Cells) -> None:
    url = cells.receiving.url
    for seed in range(20, 20 + SERVING.kv_tokens // TOKENS):
        await generate(url, prompt(seed), 1, extra_key="v0")
    answers = await asyncio.gather(*(generate(url, prompt(seed), 1, extra_key="v0") for seed in CROWD))
    assert [from_storage(a) for a in answers] == [(TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS] * len(CROWD)


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
    assert "damaged" in cells.logs[1].read_text(encoding="utf-8")


async def test_a_storage_that_is_gone_is_a_miss(cells: Cells) -> None:
    cells.folder.rename(cells.folder.with_name("gone"))  # at once: servers may be writing
    answer = await ask(cells.receiving.url, prompt(2), "v0")
    assert answer["meta_info"]["cached_tokens"] == 0
    assert await difference(cells.receiving.url, prompt(2), answer) < 1e-4


async def test_keys_and_values_of_other_weights_are_never_used(cells: Cells) -> None:
    url, ids = cells.receiving.url, prompt(3)
    async with EngineClient(url) as client:
        await generate(url, ids, 1, extra_key="same")
        live = await asyncio.gather(*(begun(url, prompt(4 + i), 700, extra_key="same") for i in range(3)))
        await client.update_weights(make_weights(1), 1)
        stale = cells.folder / "v0"
        old = {p.name: p.read_bytes()[HEADER:] for p in stale.iterdir()}
        assert len(old) >= TOKENS // PAGE_TOKENS  # all its pages are there, under the same names
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
        # Old ones are refused in the new ones' place too ...
        await client.flush_cache()
        own, before = cells.folder / "v1", pages(url)
        own.rename(cells.folder / "gone")
        stale.rename(own)
        answer = await ask(url, ids, "same")
        assert from_storage(answer) == 0 and pages(url)["corrupt"] > before.get("corrupt", 0)
        assert await difference(url, ids, answer) < 1e-4
        # ... and would be used, if they were the new ones by all that is said of them.
        await client.flush_cache()
        shutil.rmtree(own)
        for name, data in old.items():
            assert PageFolder(cells.folder, 1 << 28).put("1", name, [memoryview(data)])
        wrong = await ask(url, ids, "same")
        assert from_storage(wrong) > 0
        assert await difference(url, ids, wrong) > 0.1


async def test_a_prefix_whose_fetch_would_not_pay_is_computed(cells: Cells) -> None:
    """Whatever the estimate that the server started with: it goes by the prefills that it has measured."""
    cells.leaving.kv = plan_of(cells.folder, DEAR)
    cells.leaving.start(cells.policy, version=0)
    await cells.leaving.wait_ready()
    url, ids = cells.leaving.url, prompt(5)
    await generate(url, ids, 1)
    async with EngineClient(url) as client:
        assert await client.wait_empty(30)
        await client.flush_cache()
    answer = await generate(url, ids, 1)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert counted(url, "decisions").keys() == {"compute"} and pages(url)["stored"] >= TOKENS // PAGE_TOKENS
    said = cells.logs[0].read_text(encoding="utf-8")
    assert re.search(
        r"kv: computed: 1184 of 1184 tokens move in \d+.\d+ s, which would save .* by \d+ prefills of this", said
    )
