"""The paced engine, as the gateway and the agent meet it, and the work that it answers to."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from benchmarks.elastic.answers import Answers
from benchmarks.elastic.engine import PacedEngine
from benchmarks.elastic.paced import CONTEXT, POLICY, SLACK
from benchmarks.elastic.workload import make_work, write_tasks
from gyre.gateway.engine import Chunk, EngineClient, EngineRequest
from gyre.ports import free_port
from gyre.scheduling import step_tasks
from gyre.serving.client import EngineClient as Control
from gyre.simulation.model import CostModel

COST = CostModel(
    slots=4, decode_s=0.002, decode_s_per_rollout=0.0, prefill_tokens_s=1e6, train_tokens_s=1e5, micro_batch_tokens=256,
    to_train_s=0.01, to_rollout_s=0.01, optimizer_s=0.01,
)  # fmt: skip
LONG = 100_000
"""Tokens of an answer that no test waits for."""


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(POLICY)


@pytest.fixture
async def url(answers: Answers) -> AsyncIterator[str]:
    runner = web.AppRunner(PacedEngine(COST, answers, 0, 10_000).app())
    await runner.setup()
    port = free_port("127.0.0.1")
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


def prompt(answers: Answers, tokens: int) -> list[int]:
    return answers.encode(f"<|im_start|>user\nabc next {tokens}<|im_end|>\n<|im_start|>assistant\n")


async def generate(client: EngineClient, url: str, ids: list[int], rid: str, most: int = 999) -> list[Chunk]:
    request = EngineRequest(rid, ",".join(map(str, ids)).encode(), {"max_new_tokens": most}, "v0")
    return [chunk async for chunk in client.generate(url, request)]


def said(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.ids]


async def test_an_answer_has_the_length_that_was_asked_for_and_ends_with_the_call(answers: Answers, url: str) -> None:
    client = EngineClient(30.0)
    ids = prompt(answers, 40)
    chunks = await generate(client, url, ids, "a")
    whole = said(chunks)
    assert len(whole) == 40 and whole[-len(answers.call) :] == answers.call
    assert chunks[-1].finish == {"type": "stop"} and chunks[-1].spans == [("0", 0, 40)] and len(chunks) > 2
    # The rest of an answer that was cut off, wherever it goes on.
    assert said(await generate(client, url, ids + whole[:17], "b")) == whole[17:]
    assert said(cut := await generate(client, url, ids, "c", most=9)) == whole[:9] and cut[-1].finish == {
        "type": "length"
    }
    # The next turn finds its prefix in the cache.
    longer = await generate(client, url, ids + whole + prompt(answers, 12), "d")
    assert longer[0].cached_tokens == len(ids) + 40
    await client.close()


async def test_roles_and_weights_as_the_agent_asks_for_them(answers: Answers, url: str) -> None:
    client, ids, chunks = EngineClient(30.0), prompt(answers, LONG), [Chunk([], [], [], None, 0)]

    async def read() -> None:
        request = EngineRequest("a", ",".join(map(str, ids)).encode(), {"max_new_tokens": LONG}, "v0")
        async for chunk in client.generate(url, request):
            chunks.append(chunk)

    async def until(true: Callable[[], bool]) -> None:
        async with asyncio.timeout(300):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async with Control(url) as control:
        assert await control.health() and await control.weight_version() == 0
        live = asyncio.create_task(read())
        await until(lambda: bool(said(chunks)))
        assert await control.running_requests() == 1
        await control.update_weights_from_disk(POLICY, 1)
        await until(lambda: len(chunks[-1].spans) == 2)
        await control.pause("abort")
        await live
        assert chunks[-1].finish is not None and chunks[-1].finish["type"] == "abort"
        tokens = said(chunks)
        [old, new] = chunks[-1].spans
        assert old == ("0", 0, new[1]) and new == ("1", old[2], len(tokens)) and len(tokens) < LONG
        assert await control.wait_empty(5.0)
        await control.release_memory()
        await control.resume_memory()
        waits = asyncio.create_task(generate(client, url, ids + tokens, "b", most=20))
        while await control.running_requests() != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert not waits.done() and await control.running_requests() == 1  # paused: nothing is generated
        await control.resume()
        assert len(said(await waits)) == 20
    await client.close()


def test_the_tool_does_what_the_plan_says_and_submits(answers: Answers, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"cells": 2, "slots": 2, "groups": 2, "group_size": 3, "steps": 2, "per_token": 50.0}
    work = make_work("terminal-tail", **sizes, compression=1e6, longest=CONTEXT - SLACK, seed=3)
    write_tasks(work, tmp_path / "tasks", seed=5)
    task = tmp_path / "tasks" / f"task-{step_tasks(4, 5, 1, 2)[0]:04d}"
    workspace = tmp_path / "rollouts" / "run" / "s1" / "00" / "02.a2" / "box" / "workspace"
    workspace.parent.mkdir(parents=True)
    (task / "environment" / "workspace").rename(workspace)
    turns = work.steps[1][0][2]
    for turn, after in itertools.pairwise(turns):
        out = subprocess.run(["sh", "turn"], cwd=workspace, capture_output=True, text=True, check=True).stdout
        assert out.endswith(f" next {after.tokens}\n") and len(out) == turn.pad + len(f" next {after.tokens}\n")
    last = subprocess.run(["sh", "turn"], cwd=workspace, capture_output=True, text=True, check=True).stdout
    assert last == "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"


def test_an_answer_without_a_length_is_an_error(answers: Answers) -> None:
    with pytest.raises(ValueError, match="no `next N`"):
        answers.rest(np.asarray(answers.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"), np.int32))
