"""A real SGLang server: ids, log-probs, pausing, and weights that change under live requests."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from pathlib import Path

import httpx
import pytest
import torch

from gyre.serving.client import EngineClient, EngineError
from gyre.serving.launch import EngineProcess
from tests.serving.calls import begun, generate, logprobs, scored, until_running
from tests.serving.tiny_policy import make_weights, write_policy

PROMPT = list(range(10, 60))


async def test_logprobs_are_of_the_distribution_at_the_requests_temperature(engine: EngineProcess) -> None:
    t = 0.6
    answer = await generate(engine.url, PROMPT, 1, temperature=t, top_logprobs_num=512)
    top = answer["meta_info"]["output_top_logprobs"][0]
    assert len(top) == 512
    assert math.fsum(math.exp(entry[0]) for entry in top) == pytest.approx(1, abs=1e-4)
    plain = await generate(engine.url, PROMPT, 1, temperature=1.0, top_logprobs_num=512)
    at_one = {entry[1]: entry[0] for entry in plain["meta_info"]["output_top_logprobs"][0]}
    scaled = torch.log_softmax(torch.tensor([at_one[e[1]] / t for e in top], dtype=torch.float64), -1)
    assert torch.tensor([e[0] for e in top], dtype=torch.float64).sub(scaled).abs().max() < 1e-4


async def test_streaming_is_coarse_and_incremental(engine: EngineProcess) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 40, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "stream": True,
    }
    counts, ids = [], []
    async with (
        httpx.AsyncClient(base_url=engine.url, timeout=60) as http,
        http.stream("POST", "/generate", json=body) as stream,
    ):
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                chunk = httpx.Response(200, text=line.removeprefix("data: ")).json()
                assert [e[1] for e in chunk["meta_info"]["output_token_logprobs"]] == chunk["output_ids"]
                ids += chunk["output_ids"]
                counts.append(len(ids))
    # Chunks that wait for each other come as one, on a machine where the server's front is late.
    assert set(counts) <= {1, 17, 33, 40} and counts[-1] == len(ids) == 40


async def test_new_weights_under_live_requests(engine: EngineProcess, client: EngineClient) -> None:
    before = await client.weight_version()
    live = await asyncio.gather(*(begun(engine.url, [*PROMPT, i], 900) for i in range(3)))
    await client.update_weights(make_weights(1), before + 1)
    assert await client.weight_version() == before + 1
    for i, answer in enumerate(await asyncio.gather(*live)):
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        assert len(answer["output_ids"]) == 900
        old, new = answer["meta_info"]["weight_versions"]
        assert (old["version"], old["start"]) == (str(before), 0)
        assert (new["version"], new["start"], new["end"]) == (str(before + 1), old["end"], 900)
        # All that follows the update was computed under the new weights alone, keys and values of the prefix too.
        by_prefill = await scored(engine.url, [*PROMPT, i, *answer["output_ids"]])
        difference = (torch.tensor(by_prefill[len(PROMPT) :]) - torch.tensor(logprobs(answer))).abs()
        assert difference[old["end"] :].max() < 1e-3
        assert difference[: old["end"]].mean() > 0.05


async def test_weights_that_wait_until_a_server_is_idle(engine: EngineProcess, client: EngineClient) -> None:
    """Asked in the midst of a request they are not taken, and the request ends under the version that it began with."""
    before = await client.weight_version()
    live = asyncio.create_task(generate(engine.url, PROMPT, 900))
    await until_running(client, 1)
    assert not await client.update_weights(make_weights(2), before + 1, idle=True)
    assert await client.weight_version() == before and not live.done()
    answer = await live
    assert answer["meta_info"]["finish_reason"]["type"] == "length" and len(answer["output_ids"]) == 900
    assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == [str(before)]
    assert await client.wait_empty(60)
    assert await client.update_weights(make_weights(2), before + 1, idle=True)
    after = await generate(engine.url, PROMPT, 3)
    assert [span["version"] for span in after["meta_info"]["weight_versions"]] == [str(before + 1)]


async def test_weights_from_a_checkpoint_folder(engine: EngineProcess, client: EngineClient, tmp_path: Path) -> None:
    version = await client.weight_version()
    await client.update_weights(make_weights(5), version + 1)
    by_tensor = await scored(engine.url, PROMPT)
    await client.update_weights(make_weights(6), version + 2)
    other = await scored(engine.url, PROMPT)
    await client.update_weights_from_disk(write_policy(tmp_path / "v", seed=5), version + 3)
    assert await client.weight_version() == version + 3
    assert await scored(engine.url, PROMPT) == pytest.approx(by_tensor, abs=1e-5)
    assert other != pytest.approx(by_tensor, abs=0.01)


async def test_release_and_resume_of_an_empty_server(engine: EngineProcess, client: EngineClient) -> None:
    version = await client.weight_version()
    assert await client.wait_empty(60)
    await client.pause("abort")
    await client.release_memory()
    await client.resume_memory()
    await client.update_weights(make_weights(7), version + 1)  # leaves the server running
    assert (await generate(engine.url, PROMPT, 3))["meta_info"]["weight_version"] == str(version + 1)


async def test_a_server_that_still_answers_is_settled_when_it_has_ended(
    engine: EngineProcess, client: EngineClient
) -> None:
    live = asyncio.create_task(generate(engine.url, PROMPT, 200))
    await until_running(client, 1)
    with pytest.raises(EngineError, match="flush_cache: HTTP 400"):
        await client.flush_cache()
    await client.settle()
    assert (await live)["meta_info"]["completion_tokens"] == 200
    assert (await generate(engine.url, PROMPT, 3))["meta_info"]["completion_tokens"] == 3


async def test_abort_keeps_the_tokens_so_far(engine: EngineProcess, client: EngineClient) -> None:
    live = await begun(engine.url, PROMPT, 1900)
    assert not await client.wait_empty(0.2)
    await client.abort_all()
    answer = await live
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < 1900
    assert await client.wait_empty(60)


async def test_weights_that_are_refused_compute_nothing(engine: EngineProcess, client: EngineClient) -> None:
    """SGLang then holds the weights of its start, whatever its version says; and it might hold half of each."""
    ids: list[int] = []

    async def stream() -> None:
        sampling = {"max_new_tokens": 900, "temperature": 1.0, "ignore_eos": True, "stream_interval": 1}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True}
        async with (
            httpx.AsyncClient(base_url=engine.url, timeout=120) as http,
            http.stream("POST", "/generate", json=body) as lines,
        ):
            async for line in lines.aiter_lines():
                if line.startswith("data: {"):
                    ids.extend(json.loads(line.removeprefix("data: "))["output_ids"])

    live = asyncio.create_task(stream())
    await until_running(client, 1)
    with pytest.raises(EngineError, match=r"/update_weights_from_disk: HTTP 400: .*"):
        await client.update_weights_from_disk(Path("/nowhere"), 1)
    before = -1
    while before != len(ids):  # what was on its way comes, and no more
        before = len(ids)
        await asyncio.sleep(0.5)
    assert before < 900
    await client.resume()
    await live
    assert len(ids) == 900


async def test_refusals_name_route_and_reason(engine: EngineProcess, client: EngineClient) -> None:
    async with EngineClient("http://127.0.0.1:9") as nobody:
        assert not await nobody.health()
        with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9/flush_cache: no answer \(ConnectError"):
            await nobody.flush_cache()
    assert await client.health()
    assert len((await generate(engine.url, PROMPT, 3))["output_ids"]) == 3  # still fit to serve


async def test_z_killed_server_leaves_no_child_and_starts_anew(engine: EngineProcess, policy: Path) -> None:
    assert engine.pid is not None
    group, incarnation = engine.pid, engine.incarnation
    os.kill(engine.pid, signal.SIGKILL)
    for _ in range(1200):
        if not engine.alive and not _members(group):
            break
        await asyncio.sleep(0.05)
    assert not engine.alive
    assert not _members(group)
    engine.start(policy, version=3)
    await engine.wait_ready()
    assert engine.incarnation != incarnation
    async with EngineClient(engine.url) as client:
        assert await client.weight_version() == 3


def _members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, pgrp, *_ = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(pgrp) == group and state not in "ZX":
                found.append(int(entry.name))
    return found


async def test_counters_lie_beside_the_log_and_not_in_tmp(engine: EngineProcess) -> None:
    assert list(engine.metrics.glob("*.db"))
