"""Several gateway processes share a run: each rollout has one, and no other answers for it."""

from __future__ import annotations

import secrets
from collections import Counter

import httpx
import openai
import pytest

from gyre.gateway.errors import GatewayError
from gyre.gateway.sharding import Shard, shard_of, url_of
from tests.gateway.conftest import Served, World
from workers.stack.ports import choose_ports, gateway_names


def test_rollouts_are_spread_and_stay_where_they_are() -> None:
    tokens = [secrets.token_urlsafe(24) for _ in range(3000)]
    counts = Counter(shard_of(t, 3) for t in tokens)
    assert all(800 < counts[i] < 1200 for i in range(3))
    moved = [t for t in tokens if shard_of(t, 3) != shard_of(t, 4)]
    assert all(shard_of(t, 4) == 3 for t in moved), "only to the new one"
    assert shard_of(tokens[0], 1) == 0
    assert url_of(tokens[0], ["a", "b", "c"]) == "abc"[shard_of(tokens[0], 3)]


def test_a_process_knows_its_own() -> None:
    urls = ("http://one", "http://two")
    for token in (secrets.token_urlsafe(24) for _ in range(20)):
        mine = shard_of(token, 2)
        Shard(mine, urls).check(token)
        with pytest.raises(GatewayError, match=urls[mine]) as caught:
            Shard(1 - mine, urls).check(token)
        assert caught.value.status == 421


async def test_the_wrong_process_says_where_to_go(world: World) -> None:
    [mine] = {shard_of(world.tokens[0], 2)}
    for index in range(2):
        served = Served(world.run, world.database, shard=Shard(index, ("http://first", "http://second")))
        await served.start()
        base = f"{served.url}/r/{world.tokens[0]}/v1"
        client = openai.AsyncOpenAI(base_url=base, api_key="x", max_retries=0)
        if index == mine:
            assert [m.id async for m in client.models.list()] == ["policy"]
        else:
            with pytest.raises(openai.APIStatusError, match="calls go to http") as caught:
                await client.models.list()
            assert caught.value.status_code == 421
            async with httpx.AsyncClient() as http:
                answer = await http.post(f"{base}/messages", json={}, headers={"anthropic-version": "2023-06-01"})
            assert (answer.status_code, answer.json()["error"]["type"]) == (421, "invalid_request_error")
        await served.stop()


def test_each_process_has_a_port() -> None:
    assert gateway_names(3) == ["gateway", "gateway-1", "gateway-2"]
    ports, _ = choose_ports({}, {}, gateways=3)
    assert len({ports[name] for name in gateway_names(3)}) == 3
    again, changed = choose_ports({}, ports, gateways=2)
    assert not changed
    assert again["gateway-1"] == ports["gateway-1"]
