"""Engines that fall silent or leave and clients that go, with a stand-in for the engine: quick, and at any moment."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import openai
import pytest

from gyre.store.tokens import unpack_ids
from tests.clients import http_client
from tests.gateway.conftest import World
from tests.gateway.markov import tokenizer
from tests.gateway.stand_in import StandIn

ASK: list[Any] = [{"role": "user", "content": "Go."}]
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
WHOLE = tokenizer().encode(f"{ALPHABET}<|im_end|>", add_special_tokens=False).ids


async def ask(world: World, member: int = 0, messages: list[Any] = ASK) -> str:
    async with world.client(member) as client:
        answer = await client.chat.completions.create(model="policy", messages=messages)
    return answer.choices[0].message.content or ""


def seamless(world: World, member: int = 0) -> None:
    """Every complete call has the whole answer once, with a version for each token."""
    for call in world.calls(member):
        assert call.status == "complete"
        leaf = world.node(call.leaf_id)
        assert unpack_ids(leaf.token_ids).tolist() == WHOLE
        assert [s[1] for s in leaf.version_spans[1:]] == [s[2] for s in leaf.version_spans[:-1]]
        assert leaf.version_spans[-1][2] == len(WHOLE)


@pytest.mark.parametrize("silent_after", [0, 1, 7, len(WHOLE) - 1])
async def test_an_engine_that_takes_a_request_and_never_answers(world: World, silent_after: int) -> None:
    """Case 7: before the first token, in the middle, before the last."""
    engines = world.served.gateway.calls.engines
    generate = engines.generate
    async with StandIn() as silent, StandIn() as other:

        def impatient_with_one(url: str, request: Any) -> Any:
            engines.silence_s = 0.5 if url == silent.url else 60.0
            return generate(url, request)

        engines.generate = impatient_with_one  # type: ignore[method-assign]
        silent.text = other.text = ALPHABET
        silent.silent_after = silent_after
        world.cell("c0", engine_url=silent.url, engine_incarnation="a")
        await world.until(lambda: len(world.served.gateway.router.view()) == 1)
        call = asyncio.create_task(ask(world))
        await world.until(lambda: bool(silent.prompts))
        # It is asked again with all that it gave: then its silence was noticed.
        whole = silent.prompts[0] + WHOLE[:silent_after]
        await world.until(lambda: whole in silent.prompts[1:])
        world.cell("c1", engine_url=other.url, engine_incarnation="b")
        assert await call == ALPHABET
        seamless(world)
        assert set(world.calls()[0].cells) == {"c0", "c1"}
        await world.until(lambda: bool(silent.aborted))
        assert other.prompts == [whole], "what came before the silence is kept"


async def test_a_client_that_leaves_and_one_that_does_not(world: World, stand_in: StandIn) -> None:
    """Case 8: what nobody waits for is aborted, long before it would end; a normal finish aborts nothing."""
    stand_in.text = ALPHABET
    assert await ask(world) == ALPHABET
    assert not stand_in.aborted
    stand_in.step = 600.0
    for stream in (False, True):
        body = {"model": "policy", "messages": [*ASK, {"role": "user", "content": f"{stream}"}], "stream": stream}
        before = len(stand_in.aborted)
        async with http_client() as http:
            url = f"{world.served.url}/r/{world.tokens[0]}/v1/chat/completions"
            post = asyncio.create_task(http.post(url, json=body))
            await world.until(lambda: len(stand_in.running) == 1)
            post.cancel()
        await world.until(lambda n=before: len(stand_in.aborted) > n, timeout_s=20)
        await world.until(lambda: not stand_in.running)
        await world.until(lambda: world.calls()[-1].status == "incomplete")


async def test_sixteen_rollouts_while_cells_switch_and_weights_move(world: World) -> None:
    """Cases 11 and 12: cells leave, come back, restart and get newer weights in mid-call. No call fails."""
    rng = random.Random(7)
    async with StandIn() as a, StandIn() as b:
        engines = {"c0": a, "c1": b}
        for name, engine in engines.items():
            engine.text, engine.step = ALPHABET, 0.01
            world.cell(name, engine_url=engine.url, engine_incarnation="0")
        done = asyncio.Event()

        async def disturb() -> None:
            turn = 0
            surely = [("c0", "leave"), ("c1", "restart")]
            await world.until(lambda: bool(a.running and b.running))
            while not done.is_set():
                turn += 1
                name, what = rng.choice(["c0", "c1"]), rng.choice(["leave", "restart", "weights"])
                if surely:
                    name, what = surely.pop()
                if what == "leave":
                    world.cell(name, known=True, routable=False)
                    await asyncio.sleep(rng.random() * 0.1)
                    world.cell(name, known=True, routable=True)
                elif what == "restart":
                    world.cell(name, known=True, engine_incarnation=str(turn))
                else:
                    engines[name].version += 1
                    world.cell(name, known=True, serving_version=engines[name].version)
                await asyncio.sleep(rng.random() * 0.1)

        async def rollout(member: int, agent: int) -> None:
            messages = [{"role": "system", "content": f"agent {agent}"}, *ASK]
            for step in range(2):
                said = await ask(world, member, messages)
                assert said == ALPHABET
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"on {step}"}]

        disturbing = asyncio.create_task(disturb())
        await asyncio.gather(*(rollout(member, agent) for member in range(4) for agent in range(4)))
        done.set()
        await disturbing
        rows = [c for member in range(4) for c in world.calls(member)]
        assert len(rows) == 32
        assert any(len(c.cells) > 1 for c in rows), "something was disturbed"
        for member in range(4):
            seamless(world, member)
            assert [c.fork_reason for c in world.calls(member)].count(None) == 4
        asked = {tuple(p) for engine in engines.values() for p in engine.prompts}
        for call in rows:
            assert tuple(world.path(call.leaf_id)[: call.prompt_tokens]) in asked


async def test_a_retry_beside_its_first_call(world: World, stand_in: StandIn) -> None:
    """The same bytes are one call until they are delivered, then another sample."""
    stand_in.gate.clear()
    both = [asyncio.create_task(ask(world)) for _ in range(2)]
    await world.until(lambda: "gyre_gateway_joined_total 1.0" in world.served.gateway.metrics.text().decode())
    stand_in.gate.set()
    first, second = await asyncio.gather(*both)
    assert first == second
    assert len(world.calls()) == 1
    await ask(world)
    assert [c.fork_reason for c in world.calls()] == ["root", "resample"]


async def test_the_run_samples_as_it_says_whatever_a_harness_asks(world: World, stand_in: StandIn) -> None:
    seen: list[dict[str, Any]] = []
    generate = world.served.gateway.calls.engines.generate

    def watched(url: str, request: Any) -> Any:
        seen.append(request.sampling)
        return generate(url, request)

    world.served.gateway.calls.engines.generate = watched  # type: ignore[method-assign]
    world.rollout(temperature=0.7)
    async with world.client() as client:
        await client.chat.completions.create(
            model="policy", messages=ASK, temperature=0.0, top_p=0.1, seed=1, presence_penalty=1.0, max_tokens=7
        )
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="policy", messages=ASK, n=3)
    [sampling] = seen
    assert (sampling["temperature"], sampling["top_p"], sampling["max_new_tokens"]) == (0.7, 1.0, 7)
    assert set(sampling) == {
        "temperature", "top_p", "max_new_tokens", "stop_token_ids", "skip_special_tokens", "no_stop_trim",
    }  # fmt: skip
