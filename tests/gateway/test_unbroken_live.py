"""What happens to cells, clients and Postgres in mid-generation: the harness sees one whole answer, later."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import httpx
import openai
import pytest

from gyre.gateway import calls
from gyre.gateway.session import Session
from gyre.serving.launch import EngineProcess
from gyre.store.tokens import unpack_ids
from tests.clients import http_client
from tests.gateway.conftest import BASH, Served, World
from tests.gateway.markov import ids_of, tokenizer
from tests.gateway.proxy import Proxy

LONG = {"temperature": 0.05}  # the policy's loop never ends at this temperature
FIRST_TOKENS = 3000
"""Bytes of a streamed answer that hold a few of its tokens, and far from all."""
MESSAGES: list[Any] = [{"role": "user", "content": "Go on for long."}]


def ask(world: World, member: int = 0, **options: Any) -> asyncio.Task[Any]:
    async def call() -> Any:
        # The client must stay alive as long as the call.
        async with world.client(member, **options) as client:
            return await client.chat.completions.create(model="policy", messages=MESSAGES, tools=[BASH])

    return asyncio.create_task(call())


def session_of(world: World, member: int = 0) -> Session:
    return world.served.gateway.calls.sessions[world.tokens[member]]


async def running(http: httpx.AsyncClient) -> int:
    loads = (await http.get("/v1/loads")).json()["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


async def until_running(engine: EngineProcess, count: int, timeout_s: float = 300.0) -> None:
    async with asyncio.timeout(timeout_s), http_client(engine.url) as http:
        while await running(http) != count:  # noqa: ASYNC110 - what is awaited is in another process
            await asyncio.sleep(0.02)


async def go_through(live: World, proxy: Proxy) -> None:
    """What the gateway asks of c0 goes through the proxy from now on."""
    live.cell("c0", engine_url=proxy.url, engine_incarnation="behind the proxy")
    await live.until(lambda: [c["url"] for c in live.served.gateway.router.view()] == [proxy.url])


def whole(world: World, cells: list[str]) -> None:
    """The one call is complete: 400 tokens without a seam, though several cells gave them."""
    [call] = world.calls()
    assert (call.status, call.finish_reason, call.completion_tokens) == ("complete", "length", 400)
    assert call.cells == cells
    leaf = world.node(call.leaf_id)
    ids = unpack_ids(leaf.token_ids).tolist()
    made = tokenizer()
    loop = ids_of("ls ", made)
    assert ids == [*made.encode('<tool_call>\n{"name": "bash", "arguments": {"command": "').ids, *[loop] * 398]


async def test_a_cell_that_leaves_in_mid_generation(live: World, sglang: EngineProcess) -> None:
    live.rollout(**LONG)
    call = ask(live)
    await until_running(sglang, 1)
    live.cell("c1", engine_url=sglang.url, engine_incarnation="other", serving_version=4)
    live.cell("c0", known=True, routable=False)
    answer = await call
    assert answer.usage.completion_tokens == 400
    whole(live, ["c0", "c1"])
    await until_running(sglang, 0)


async def test_no_cell_for_a_while(live: World, sglang: EngineProcess) -> None:
    live.rollout(**LONG)
    call = ask(live)
    await until_running(sglang, 1)
    live.cell("c0", known=True, routable=False)
    await until_running(sglang, 0)
    await asyncio.sleep(0.3)
    assert not call.done()
    live.cell("c0", known=True, routable=True)
    await call
    whole(live, ["c0"])


async def test_a_weight_update_in_the_middle_of_a_decode(live: World, sglang: EngineProcess) -> None:
    live.rollout(**LONG)
    async with Proxy(sglang.url) as proxy, http_client() as http:
        await go_through(live, proxy)
        call = ask(live)
        await live.until(lambda: proxy.most > FIRST_TOKENS)
        body = {"new_version": "5", "abort_all_requests": False}
        assert (await http.post(f"{sglang.url}/update_weight_version", json=body)).status_code == 200
        live.cell("c0", known=True, serving_version=5)
        try:
            await call
        finally:
            await http.post(f"{sglang.url}/update_weight_version", json={**body, "new_version": "3"})
    whole(live, ["c0"])
    spans = live.node(live.calls()[0].leaf_id).version_spans
    assert [s[0] for s in spans] == [3, 5]
    assert spans[0][1] == 0 and spans[0][2] == spans[1][1] and spans[1][2] == 400


async def test_an_engine_that_falls_silent(live: World, sglang: EngineProcess) -> None:
    live.rollout(**LONG)
    async with Proxy(sglang.url, hold_after=FIRST_TOKENS) as proxy:
        await go_through(live, proxy)
        gateway = live.served.gateway
        gateway.calls.engines.silence_s = 1.0
        call = ask(live)
        await asyncio.wait_for(proxy.held.wait(), 300)
        await live.until(lambda: 'reason="silence"' in gateway.metrics.text().decode())
        gateway.calls.engines.silence_s = 60.0
        live.cell("c0", known=True, routable=False)
        live.cell("c1", engine_url=sglang.url, engine_incarnation="other")
        await call
    whole(live, ["c0", "c1"])


async def test_a_client_that_leaves(live: World, sglang: EngineProcess) -> None:
    live.rollout(**LONG)
    async with Proxy(sglang.url, hold_after=FIRST_TOKENS) as proxy:
        await go_through(live, proxy)
        call = ask(live)
        await asyncio.wait_for(proxy.held.wait(), 300)
        call.cancel()
        await live.until(lambda: [c.status for c in live.calls()] == ["incomplete"])
        await until_running(sglang, 0)
    live.cell("c0", engine_url=sglang.url, engine_incarnation=sglang.incarnation)
    leaf = live.node(live.calls()[0].leaf_id)
    assert 0 < leaf.length < 400
    # It is on the record, and nothing goes on from it.
    live.rollout(temperature=1.0)
    await live.until(lambda: session_of(live).facts.temperature == 1.0)
    await ask(live)
    assert live.calls()[1].parent_call_id is None
    assert live.calls()[1].status == "complete"


async def test_a_stream_that_is_dropped(live: World, sglang: EngineProcess) -> None:
    live.rollout(**LONG)
    body = {"model": "policy", "messages": MESSAGES, "tools": [BASH], "stream": True}
    async with http_client() as http:
        post = asyncio.create_task(http.post(f"{live.served.url}/r/{live.tokens[0]}/v1/chat/completions", json=body))
        await until_running(sglang, 1)
        post.cancel()
    await live.until(lambda: [c.status for c in live.calls()] == ["incomplete"])
    await until_running(sglang, 0)


async def test_a_retry_joins_until_it_is_delivered(live: World) -> None:
    live.cell("c0", known=True, routable=False)
    await live.until(lambda: [c["routable"] for c in live.served.gateway.router.view()] == [False])
    both = [ask(live), ask(live)]
    await live.until(lambda: "gyre_gateway_joined_total 1.0" in live.served.gateway.metrics.text().decode())
    live.cell("c0", known=True, routable=True)
    first, second = await asyncio.gather(*both)
    assert first == second
    assert len(live.calls()) == 1
    third = await ask(live)
    assert third.id != first.id
    rows = live.calls()
    assert [c.fork_reason for c in rows] == ["root", "resample"]
    nodes = [live.node(c.leaf_id) for c in rows]
    assert nodes[0].parent_id == nodes[1].parent_id, "a true resample is a second child of the same prompt"
    assert rows[1].new_tokens == 0


async def test_a_retry_after_a_lost_connection(
    live: World, sglang: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks, the same bytes come again within the grace: one call, no second sample."""
    monkeypatch.setattr(calls, "JOIN_GRACE_S", 10.0)
    live.rollout(**LONG)
    call = ask(live)
    await until_running(sglang, 1)
    call.cancel()
    await asyncio.sleep(0.1)
    answer = await ask(live)
    assert answer.usage.completion_tokens == 400
    whole(live, ["c0"])


async def test_a_finished_answer_survives_the_gateway(live: World) -> None:
    """It was recorded, nobody went on from it, the gateway died: the same bytes get the same answer, once."""
    first = await ask(live)
    await live.restart()
    assert (await ask(live)).choices == first.choices
    assert len(live.calls()) == 1
    await ask(live)
    assert [c.fork_reason for c in live.calls()] == ["root", "resample"]


async def test_calls_wait_for_the_version_that_they_need(live: World) -> None:
    live.rollout(min_version=4)
    call = ask(live)
    await asyncio.sleep(0.3)
    assert not call.done()
    live.cell("c0", known=True, serving_version=4)
    await call
    assert live.calls()[0].status == "complete"


async def test_postgres_is_away_for_a_moment(live: World, sglang: EngineProcess) -> None:
    async with Proxy(live.database) as proxy:
        head, _, name = live.database.rpartition("/")
        user = head.partition("://")[2].rpartition("@")[0]
        served = Served(live.run, f"postgresql+psycopg://{user}@127.0.0.1:{proxy.port}/{name}", patience_s=600.0)
        await served.start()
        live.served, old = served, live.served
        try:
            await live.until(lambda: served.gateway.router.view() != [])
            live.rollout(**LONG)
            call = ask(live)
            await until_running(sglang, 1)
            await proxy.down()
            await until_running(sglang, 0)
            await asyncio.sleep(0.5)
            assert not call.done(), "an answer is never delivered before it is recorded"
            await proxy.up()
            await call
            whole(live, ["c0"])

            live.rollout(member=1, temperature=1.0)
            served.gateway.recorder.patience_s = 1.0
            await proxy.down()
            with pytest.raises(openai.InternalServerError, match="database does not answer") as caught:
                await ask(live, 1)
            assert caught.value.status_code == 503
        finally:
            await served.stop()
            live.served = old


async def test_an_engine_that_is_killed(live: World, sglang: EngineProcess, policy_path: Any) -> None:
    """kill -9 in mid-generation, then a restart with newer weights: one answer, in spans of two versions."""
    live.rollout(**LONG)
    assert sglang.pid is not None
    async with Proxy(sglang.url, hold_after=FIRST_TOKENS) as proxy:
        await go_through(live, proxy)
        call = ask(live)
        await asyncio.wait_for(proxy.held.wait(), 300)
        os.killpg(sglang.pid, signal.SIGKILL)
        gateway = live.served.gateway
        await live.until(lambda: 'reason="gone"' in gateway.metrics.text().decode())
    assert not call.done()
    sglang.start(policy_path, version=4)
    await sglang.wait_ready()
    live.cell("c0", known=True, engine_url=sglang.url, engine_incarnation=sglang.incarnation, serving_version=4)
    try:
        await call
    finally:
        async with http_client() as http:
            await http.post(
                f"{sglang.url}/update_weight_version", json={"new_version": "3", "abort_all_requests": False}
            )
    whole(live, ["c0"])
    assert [s[0] for s in live.node(live.calls()[0].leaf_id).version_spans] == [3, 4]
