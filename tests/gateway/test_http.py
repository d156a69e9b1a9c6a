"""Routes, whose call it is, and errors in OpenAI's shape; no engine is needed to refuse."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from gyre.gateway import app as app_module
from gyre.store.call_writer import CallWriter
from gyre.store.db import transaction
from gyre.store.gateway_queries import CallWrite
from gyre.store.models import Run
from tests.clients import http_client, openai_client
from tests.gateway.conftest import CONTEXT, World

HELLO: list[Any] = [{"role": "user", "content": "hi"}]


async def create(client: openai.AsyncOpenAI, **change: Any) -> Any:
    return await client.chat.completions.create(**{"model": "policy", "messages": HELLO, **change})


async def test_unknown_token(world: World) -> None:
    client = openai_client(f"{world.served.url}/r/guess/v1")
    with pytest.raises(openai.AuthenticationError, match="No rollout has this token"):
        await create(client)
    with pytest.raises(openai.AuthenticationError):
        await client.models.list()


async def test_no_token_at_all(world: World) -> None:
    async with http_client(world.served.url) as http:
        answer = await http.post("/v1/chat/completions", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await http.get("/nowhere")).json()["error"]["message"].startswith("Unknown path")


async def test_the_token_as_api_key(world: World) -> None:
    client = openai_client(f"{world.served.url}/v1", world.tokens[0])
    assert [m.id async for m in client.models.list()] == ["policy"]
    with pytest.raises(openai.NotFoundError, match="does not exist") as caught:
        await create(client, model="gpt-4o")
    assert caught.value.code == "model_not_found"
    assert world.calls() == []


@pytest.mark.parametrize("state", ["scoring", "settled"])
async def test_a_rollout_that_is_over(world: World, state: str) -> None:
    client = world.client()
    await client.models.list()
    outcome = {"outcome": "completed", "reward": 1.0} if state == "settled" else {}
    world.rollout(state=state, **outcome)
    await world.until(lambda: not world.served.gateway.calls.sessions)
    with pytest.raises(openai.PermissionDeniedError, match=f"is over \\({state}\\)") as caught:
        await create(client)
    assert caught.value.code == "rollout_over"


async def test_the_waiting_call_of_a_rollout_that_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    call = asyncio.create_task(create(world.client()))
    await world.until(lambda: world.served.gateway.router.waiting == 1)
    await world.until(lambda: len(world.calls()) == 1)
    world.rollout(state="scoring")
    await world.served.gateway.calls.sweep()
    with pytest.raises(openai.InternalServerError, match="aborted"):
        await call
    assert world.served.gateway.router.waiting == 0
    await world.until(lambda: world.calls()[0].status == "incomplete")


async def test_a_rollout_of_another_run(world: World) -> None:
    with transaction(world.db) as s:
        s.add(Run(id="other", config={}, state="running", workflow_id="x"))
    world.rollout(run_id="other")
    with pytest.raises(openai.PermissionDeniedError, match="belongs to run other"):
        await create(world.client())


async def test_a_bad_request_names_its_field(world: World) -> None:
    with pytest.raises(openai.BadRequestError, match="one call samples one answer") as caught:
        await create(world.client(), n=2)
    assert caught.value.param == "n"
    async with http_client() as http:
        answer = await http.post(f"{world.served.url}/r/{world.tokens[0]}/v1/chat/completions", content=b"{nope")
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_that_is_too_long(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "MAX_BODY", 1000)
    with pytest.raises(openai.APIStatusError, match="longer than 1000 bytes") as caught:
        await create(world.client(), messages=[{"role": "user", "content": "x" * 1000}])
    assert caught.value.status_code == 413


@pytest.mark.parametrize("stream", [False, True])
async def test_context_overflow(world: World, stream: bool) -> None:
    """Case 9: OpenAI's own shape, and the true count of tokens."""
    with pytest.raises(openai.BadRequestError, match="maximum context length is") as caught:
        await create(world.client(), messages=[{"role": "user", "content": "x" * CONTEXT}], stream=stream)
    assert caught.value.code == "context_length_exceeded"
    [call] = world.calls()
    assert (call.status, call.finish_reason, call.leaf_id) == ("refused", "context_overflow", None)
    assert f"resulted in {call.prompt_tokens} tokens" in str(caught.value)
    assert call.prompt_tokens == len("xuserassistant") + 4 + 3 - 1 + CONTEXT - 1


async def test_a_gateway_that_ends_marks_its_calls(world: World) -> None:
    call = asyncio.create_task(create(world.client()))
    await world.until(lambda: len(world.calls()) == 1)
    await world.served.stop()
    with pytest.raises(openai.InternalServerError, match="is being restarted; try again") as caught:
        await call
    assert caught.value.status_code == 503
    assert world.calls()[0].status == "incomplete"


async def test_characters_that_postgres_cannot_hold(world: World) -> None:
    call = asyncio.create_task(create(world.client(), messages=[{"role": "user", "content": "a\x00b \U0001f600"}]))
    await world.until(lambda: len(world.calls()) == 1)
    assert world.calls()[0].request["messages"] == [{"role": "user", "content": "a\u2400b \U0001f600"}]
    call.cancel()


async def test_a_commit_whose_answer_was_lost_is_written_again_without_harm(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres committed and died before it could say so: the same write comes once more."""
    recorder = world.served.gateway.recorder
    call_id, prompt_id, leaf_id = [await recorder.new_id(table) for table in ("calls", "nodes", "nodes")]
    begin = {
        "id": call_id, "rollout_id": world.ids[0], "seq": 0, "api": "openai-chat", "status": "running", "kind": "main",
        "request_hash": "h", "request": {},
    }  # fmt: skip
    node = {"rollout_id": world.ids[0], "call_id": call_id, "length": 1, "token_ids": bytes(4)}
    prompt = {"id": prompt_id, "parent_id": None, "kind": "prompt", "start": 0, "logprobs": None, "version_spans": None}
    leaf = {
        "id": leaf_id, "parent_id": prompt_id, "kind": "generated", "start": 1, "logprobs": bytes(4),
        "version_spans": [[0, 0, 1]],
    }  # fmt: skip
    write = CallWrite(call_id, begin, [prompt | node, leaf | node], {"status": "complete", "leaf_id": leaf_id})
    write.end = {**(write.end or {}), "cells": ["c0"]}
    answered = CallWriter.write
    lost = [True]

    async def committed_but_unknown(writer: CallWriter, writes: list[CallWrite]) -> None:
        await answered(writer, writes)
        if lost:
            lost.clear()
            raise ConnectionResetError

    monkeypatch.setattr(CallWriter, "write", committed_but_unknown)
    await recorder.write(write)
    [call] = world.calls()
    assert (call.status, call.leaf_id, len(world.path(leaf_id))) == ("complete", leaf_id, 2)


async def test_health_metrics_and_cells(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr(app_module, "CELLS_POLL_S", 600.0)  # what comes, comes by NOTIFY
    world.cell("c1", routable=False)
    await world.restart()
    await world.until(lambda: len(world.served.gateway.router.view()) == 1)  # it has looked once, and listens
    world.cell(engine_url="http://127.0.0.1:9", engine_incarnation="i")
    await world.until(lambda: len(world.served.gateway.router.view()) == 2)
    async with http_client(world.served.url) as http:
        assert (await http.get("/health")).json()["status"] == "ok"
        [cell, _] = sorted((await http.get("/admin/cells")).json()["cells"], key=lambda c: c["name"])
        assert "127.0.0.1:9" not in str(cell), "an agent that asks learns no engine's address"
        assert (cell["name"], cell["routable"], cell["version"], cell["running"]) == ("c0", True, 3, 0)
        assert "gyre_gateway_running 0.0" in (await http.get("/metrics")).text


async def test_the_harness_sees_only_time_while_no_cell_can_be_reached(world: World) -> None:
    world.cell(engine_url="http://127.0.0.1:9", engine_incarnation="i")
    call = asyncio.create_task(create(world.client()))
    metrics = world.served.gateway.metrics
    await world.until(lambda: 'gyre_gateway_reroutes_total{cell="c0",reason="gone"}' in metrics.text().decode())
    await asyncio.sleep(0.5)
    assert not call.done()
    call.cancel()


async def test_a_stream_shows_signs_of_life_before_its_answer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "PING_S", 0.1)
    url = f"{world.served.url}/r/{world.tokens[0]}/v1/chat/completions"
    body = json.dumps({"model": "policy", "messages": HELLO, "stream": True})
    async with http_client() as http, http.stream("POST", url, content=body) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        assert await anext(answer.aiter_bytes()) == b": working\n\n"
