"""Two real gateway processes before one Postgres and one cell: each is killed in mid-call, and no call is lost or told
twice; the rollouts of the other one notice nothing."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from gyre.gateway.sharding import shard_of
from gyre.ports import free_port
from gyre.store.db import transaction
from gyre.store.models import Node
from tests.clients import http_client, openai_client
from tests.gateway.conftest import World
from tests.gateway.stand_in import MADE, StandIn
from tests.scripted.gateway import GatewayProcess

KILLS = (0, 1, 0)
TEXT = "what was found, word by word"


@pytest.fixture
async def processes(world: World, tmp_path: Path) -> AsyncIterator[list[GatewayProcess]]:
    """Both processes of `world`, two of its four rollouts with each."""
    await world.served.stop()
    for member in range(4):
        world.tokens[member] = next(t for t in iter(secrets.token_urlsafe, None) if shard_of(t, 2) == member % 2)
        world.rollout(member, token=world.tokens[member])
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    made = [GatewayProcess(world, tmp_path / str(i), urls, i) for i in range(2)]
    try:
        await asyncio.gather(*(p.start() for p in made))
        yield made
    finally:
        for process in made:
            await process.stop()


async def test_each_is_killed_while_the_other_serves(
    world: World, processes: list[GatewayProcess], stand_in: StandIn
) -> None:
    stand_in.text = TEXT
    histories: list[list[Any]] = [[{"role": "user", "content": f"rollout {member}"}] for member in range(4)]
    told: list[list[str]] = [[] for _ in range(4)]

    async def turn(member: int, retries: int = 0) -> None:
        base, history = f"{processes[member % 2].url}/r/{world.tokens[member]}/v1", histories[member]
        async with openai_client(base, max_retries=retries) as client:
            answer = await client.chat.completions.create(model="policy", messages=history)
        said = answer.choices[0].message.content
        assert said == TEXT
        told[member].append(answer.id)
        history += [{"role": "assistant", "content": said}, {"role": "user", "content": f"on {len(history)}"}]

    for index in KILLS:
        theirs, others = [m for m in range(4) if m % 2 == index], [m for m in range(4) if m % 2 != index]
        stand_in.step = 600.0
        cut = [asyncio.create_task(turn(member, retries=100)) for member in theirs]
        await world.until(lambda: len(stand_in.running) == 2)
        await world.until(lambda theirs=theirs: all("running" in {c.status for c in world.calls(m)} for m in theirs))
        await processes[index].stop()
        for stop in stand_in.running.values():  # an engine ends what nobody listens to
            stop.set()
        await world.until(lambda: not stand_in.running)
        stand_in.step = 0.0
        await asyncio.gather(*(turn(member) for member in others))
        await processes[index].start()
        await asyncio.gather(*cut)
        await asyncio.gather(*(turn(member) for member in range(4)))

    for member in range(4):
        calls = world.calls(member)
        complete = [c for c in calls if c.status == "complete"]
        turns = 2 * len(KILLS)
        assert len(complete) == len(set(told[member])) == turns, "each turn is one call"
        assert [c.fork_reason for c in complete] == ["root"] + [None] * (turns - 1)
        assert [c.parent_call_id for c in complete[1:]] == [c.id for c in complete[:-1]]
        assert [c.status for c in calls if c.status != "complete"] == ["incomplete"] * KILLS.count(member % 2)
        # The branch has each question and answer once: what the engine got last, and what it gave.
        last = world.path(complete[-1].leaf_id)
        assert last[: complete[-1].prompt_tokens] in stand_in.prompts
        answer = MADE.encode(f"{TEXT}<|im_end|>", add_special_tokens=False).ids
        assert sum(last[i : i + len(answer)] == answer for i in range(len(last))) == turns
        with transaction(world.db) as s:
            nodes = list(s.scalars(select(Node).where(Node.rollout_id == world.ids[member])))
        assert sum(n.kind == "generated" for n in nodes) == turns


async def test_together_they_give_a_cell_what_fits_it(
    world: World, processes: list[GatewayProcess], stand_in: StandIn
) -> None:
    """A cell for two calls takes one of each process; the other rollouts' calls wait."""
    world.cell("c0", known=True, max_running=2)
    for process in processes:
        await _until(process, "/admin/cells", lambda seen: [c["max_running"] for c in seen["cells"]] == [1])
    stand_in.step = 600.0
    calls = []
    for member in range(4):
        body = {"model": "policy", "messages": [{"role": "user", "content": "go"}]}
        url = f"{processes[member % 2].url}/r/{world.tokens[member]}/v1/chat/completions"
        calls.append(asyncio.create_task(_post(url, body)))
    for process in processes:
        await _until(process, "/health", lambda seen: seen["waiting"] == 1)
    await world.until(lambda: len(stand_in.running) == 2)
    assert len(stand_in.prompts) == 2
    stand_in.step = 0.0
    for stop in list(stand_in.running.values()):
        stop.set()
    assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 4


async def _until(process: GatewayProcess, path: str, true: Callable[[Any], bool]) -> None:
    async with asyncio.timeout(60), http_client(process.url) as http:
        while not true((await http.get(path)).json()):  # noqa: ASYNC110 - what is awaited is in another process
            await asyncio.sleep(0.02)


async def _post(url: str, body: dict[str, Any]) -> httpx.Response:
    async with http_client() as http:
        return await http.post(url, json=body)
