"""Several gateway processes share a run: each rollout has one, and no other answers for it."""

from __future__ import annotations

import secrets
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from gyre.config import RunConfig
from gyre.config.run import StackConfig
from gyre.gateway.errors import GatewayError
from gyre.gateway.sharding import Shard, shard_of, url_of
from tests.clients import http_client, openai_client
from tests.gateway.conftest import Served, World
from tests.gateway.stand_in import StandIn
from workers.settings import WorkerSettings
from workers.stack.ports import choose_ports, gateway_names
from workers.stack.services import StackPlan, run_stages


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
        client = openai_client(base)
        if index == mine:
            assert [m.id async for m in client.models.list()] == ["policy"]
        else:
            with pytest.raises(openai.APIStatusError, match="calls go to http") as caught:
                await client.models.list()
            assert caught.value.status_code == 421
            async with http_client() as http:
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


def test_the_stack_starts_each_and_tells_everybody(run: RunConfig, tmp_path: Path) -> None:
    run = run.model_copy(update={"stack": StackConfig(gateways=3)})
    ports, _ = choose_ports({}, {}, gateways=3)
    plan = StackPlan(tmp_path, ports, tmp_path / "run.json", run)
    specs = [spec for stage in run_stages(plan) for spec in stage if spec.component == "gateway"]
    assert [spec.name for spec in specs] == ["gateway", "gateway-1", "gateway-2"]
    assert [spec.argv[-1] for spec in specs] == ["workers.gateway", "1", "2"]
    urls = WorkerSettings.from_env(plan.environment()).gateway_urls
    assert urls == tuple(f"http://127.0.0.1:{ports[name]}" for name in gateway_names(3))


async def test_a_rolling_restart(world: World, stand_in: StandIn) -> None:
    """Two processes, ended and started anew one after the other, under conversations that go on."""
    urls = ("http://first", "http://second")

    async def start(index: int) -> Served:
        served = Served(world.run, world.database, shard=Shard(index, urls))
        await served.start()
        return served

    processes = [await start(i) for i in range(2)]
    histories: list[list[Any]] = [[{"role": "user", "content": f"rollout {i}"}] for i in range(4)]
    for step in range(4):
        for member, history in enumerate(histories):
            token = world.tokens[member]
            base = f"{processes[shard_of(token, 2)].url}/r/{token}/v1"
            async with openai_client(base) as client:
                answer = await client.chat.completions.create(model="policy", messages=history)
            said = answer.choices[0].message.content
            history += [{"role": "assistant", "content": said}, {"role": "user", "content": f"on {step}"}]
        await processes[step % 2].stop()
        processes[step % 2] = await start(step % 2)
    for member in range(4):
        assert [c.fork_reason for c in world.calls(member)] == ["root", None, None, None]
    for process in processes:
        await process.stop()
