"""JSON that is nested without end, sampled or sent: text, or an error in the provider's shape; never a 500."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from gyre.gateway.messages import DEEPEST, Message, ToolCall, argument_value, difference, too_deep
from gyre.gateway.policy import Policy
from tests.clients import http_client
from tests.gateway.conftest import BASH, World
from tests.gateway.paper import ids
from tests.gateway.stand_in import StandIn


def nested(levels: int) -> str:
    return '{"a":' * (levels - 1) + "{}" + "}" * (levels - 1)


@pytest.mark.parametrize(("levels", "is_call"), [(3, True), (DEEPEST, True), (DEEPEST + 1, False), (400, False)])
def test_a_sampled_call(policy: Policy, levels: int, is_call: bool) -> None:
    text = f'<tool_call>\n{{"name": "bash", "arguments": {nested(levels)}}}\n</tool_call>'
    reply = policy.reply([], ids(text + "<|im_end|>"), [BASH], True)
    assert bool(reply.tool_calls) == is_call
    assert is_call or nested(levels) in reply.content, "what was sampled stays, as text"


@pytest.mark.parametrize("levels", [254, 900, 5000])
def test_arguments_that_come_back(levels: int) -> None:
    deep = Message("assistant", "", None, (ToolCall("c", "f", nested(levels)),))
    other = Message("assistant", "", None, (ToolCall("c", "f", nested(levels) + " "),))
    assert difference(deep, deep) is None
    assert difference(deep, other) == "arguments_edited"
    assert argument_value(nested(levels)) == nested(levels)


def test_depth() -> None:
    assert not too_deep(orjson.loads(nested(DEEPEST)))
    assert too_deep(orjson.loads(nested(DEEPEST + 1)))


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
async def test_a_request(world: World, stand_in: StandIn, path: str) -> None:
    deep = orjson.loads(nested(300))
    body: dict[str, Any] = {"model": "policy", "max_tokens": 9}
    said = [{"role": "user", "content": "x"}]
    if path == "chat/completions":
        body |= {"messages": said, "tools": [{"type": "function", "function": {"name": "f", "parameters": deep}}]}
    elif path == "messages":
        body |= {"messages": said, "tools": [{"name": "f", "input_schema": deep}]}
    else:
        body |= {"input": said, "tools": [{"type": "function", "name": "f", "parameters": deep}]}
    async with http_client() as http:
        url = f"{world.served.url}/r/{world.tokens[0]}/v1/{path}"
        answer = await http.post(url, content=json.dumps(body))
    assert answer.status_code == 400
    assert "nested more than" in answer.json()["error"]["message"]


async def test_a_request_that_cannot_be_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RecursionError("deep")

    monkeypatch.setattr(type(world.served.gateway.dialect), "normalise", broken)
    async with http_client() as http:
        url = f"{world.served.url}/r/{world.tokens[0]}/v1/messages"
        said = [{"role": "user", "content": "x"}]
        answer = await http.post(url, json={"model": "policy", "max_tokens": 9, "messages": said})
    assert (answer.status_code, answer.json()["type"]) == (500, "error")


async def test_what_runs_beside_the_requests_outlives_an_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, failed = world.served.gateway, []

    def once(name: str, of: Any) -> Any:
        real = getattr(of, name)

        def call(*args: Any) -> Any:
            if failed.count(name) == 0:
                failed.append(name)
                raise KeyError(name)
            return real(*args)

        monkeypatch.setattr(of, name, call)

    once("apply", gateway.router)
    once("sweep", gateway.calls)
    await world.until(lambda: sorted(failed) == ["apply", "sweep"])
    world.cell(engine_url="http://127.0.0.1:9", engine_incarnation="i")
    await world.until(lambda: len(gateway.router.view()) == 1)
    swept: list[int] = []
    real = gateway.calls.sweep

    async def sweep() -> None:
        swept.append(1)
        await real()

    monkeypatch.setattr(gateway.calls, "sweep", sweep)
    await world.until(lambda: bool(swept))
