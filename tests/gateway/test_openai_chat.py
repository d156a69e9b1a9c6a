"""OpenAI Chat Completions, read by the official client; no engine is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.gateway import openai_chat as wire
from gyre.gateway.errors import GatewayError, context_overflow
from gyre.gateway.messages import Message, Request, ToolCall, difference
from gyre.gateway.result import Result
from tests.gateway.conftest import BASH

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
CALLS = (ToolCall("call_1", "bash", '{"command": "ls"}'), ToolCall("call_2", "bash", '{"command": "pwd"}'))
REPLY = Message("assistant", "Doing it.\n", "I think.", CALLS)


def parse(**fields: Any) -> Request:
    return wire.parse_request(json.dumps({"model": "policy", "messages": HELLO, **fields}).encode(), "policy")


def replying(reply: Message, finish: str = "stop") -> Callable[[httpx.Request], httpx.Response]:
    """A server that gives this answer to whatever is asked."""

    def handle(http: httpx.Request) -> httpx.Response:
        request = wire.parse_request(http.content, "policy")
        made = Result(7, 1700000000, reply, finish, prompt_tokens=100, completion_tokens=9, cached_tokens=64)
        if request.stream:
            body = wire.PING + b"".join(wire.chunks(made, "policy", request))
            return httpx.Response(200, content=body, headers={"content-type": "text/event-stream"})
        return httpx.Response(200, content=wire.response(made, "policy", request))

    return handle


def client(handle: Callable[[httpx.Request], httpx.Response]) -> openai.OpenAI:
    http = httpx.Client(transport=httpx.MockTransport(handle))
    return openai.OpenAI(base_url="http://gateway/v1", api_key="k", http_client=http, max_retries=0)


def check_reply(message: Any) -> None:
    assert message.content == "Doing it.\n" and message.reasoning_content == "I think."
    calls = [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls]
    assert calls == [(c.id, c.name, c.arguments) for c in CALLS]


def test_a_whole_answer() -> None:
    got = client(replying(REPLY)).chat.completions.create(model="policy", messages=HELLO, tools=[BASH])
    [choice] = got.choices
    check_reply(choice.message)
    assert choice.finish_reason == "tool_calls" and choice.message.refusal is None and choice.logprobs is None
    assert got.usage is not None and got.usage.prompt_tokens_details is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (100, 9, 109)
    assert got.usage.prompt_tokens_details.cached_tokens == 64


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_says_what_a_whole_answer_says(usage: bool) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if usage else {}
    chat = client(replying(REPLY)).chat.completions
    with chat.stream(model="policy", messages=HELLO, tools=[BASH], **options) as stream:
        chunks = [e.chunk for e in stream if e.type == "chunk"]
        final = stream.get_final_completion()
    check_reply(final.choices[0].message)
    assert final.choices[0].finish_reason == "tool_calls"
    told = [c.usage for c in chunks if c.usage is not None]
    assert [u.total_tokens for u in told] == ([109] if usage else [])
    assert all(c.choices for c in chunks[: len(chunks) - usage]), "usage comes last, in a chunk of its own"


@pytest.mark.parametrize(
    ("reply", "finish", "said"),
    [
        (Message("assistant", "half"), "length", "length"),
        (Message("assistant", "half", None, CALLS[:1]), "length", "length"),
        (Message("assistant", "text"), "stop", "stop"),
        (Message("assistant", "", "only thought"), "stop", "stop"),
    ],
)
def test_why_it_ended(reply: Message, finish: str, said: str) -> None:
    for stream in (False, True):
        got: Any = client(replying(reply, finish)).chat.completions.create(
            model="policy", messages=HELLO, tools=[BASH], stream=stream
        )
        last = [c for c in got if c.choices][-1] if stream else got
        assert last.choices[0].finish_reason == said


TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
REPLIES = st.builds(
    lambda content, thought, calls: Message(
        "assistant", content, thought or None, tuple(ToolCall(f"c{i}", n, a) for i, (n, a) in enumerate(calls))
    ),
    TEXT.filter(lambda t: "</think>" not in t), st.none() | TEXT, st.lists(st.tuples(TEXT, TEXT), max_size=3),
)  # fmt: skip


@settings(deadline=None)
@given(REPLIES, st.booleans())
def test_what_is_emitted_comes_back_as_the_same_message(reply: Message, stream: bool) -> None:
    got: Any = client(replying(reply)).chat.completions.create(
        model="policy", messages=HELLO, tools=[BASH], stream=stream
    )
    if stream:
        message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
        for delta in (c.choices[0].delta for c in got):
            message["content"] += delta.content or ""
            message["reasoning_content"] = getattr(delta, "reasoning_content", None) or message.get("reasoning_content")
            message["tool_calls"] += [c.model_dump() for c in delta.tool_calls or []]
    else:
        message = got.choices[0].message.model_dump()
    echoed = parse(messages=[*HELLO, message, *HELLO]).messages[1]
    assert difference(reply, echoed) is None and (echoed.reasoning or "").strip() == (reply.reasoning or "").strip()


def test_roles_and_parts() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    request = parse(
        messages=[
            {"role": "system", "content": "a"},
            {"role": "developer", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
            {"role": "user", "content": [{"type": "text", "text": "d"}], "name": "someone"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": {"name": "f"}}]},
            {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "see "}, image]},
            {"role": "system", "content": "e"},
            {"role": "assistant", "content": "begun"},
        ]
    )
    assert [(m.role, m.content) for m in request.messages] == [
        ("system", "a"),
        ("system", "bc"),
        ("user", "d"),
        ("assistant", ""),
        ("tool", "see [image left out: this model reads text only]"),
        ("system", "e"),
        ("assistant", "begun"),
    ]


@pytest.mark.parametrize(
    "wish",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "bash"}}},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
        {"parallel_tool_calls": False},
        {"logprobs": False, "n": 1, "user": "someone", "seed": 1, "temperature": 0.1, "store": True},
    ],
)
def test_wishes_are_taken_and_recorded(wish: dict[str, Any]) -> None:
    request = parse(tools=[BASH], **wish)
    assert request.parse_tool_calls and request.messages == parse().messages
    for name, value in wish.items():
        if name in ("tool_choice", "response_format", "parallel_tool_calls"):
            assert request.options[name] == value


def test_errors_have_their_class_in_the_client() -> None:
    errors: list[tuple[GatewayError, type[openai.APIStatusError], str | None]] = [
        (GatewayError("bad_request", "x", "n"), openai.BadRequestError, None),
        (context_overflow(9, 8), openai.BadRequestError, "context_length_exceeded"),
        (GatewayError("unauthorized", "x"), openai.AuthenticationError, "invalid_api_key"),
        (GatewayError("forbidden", "x"), openai.PermissionDeniedError, "rollout_over"),
        (GatewayError("unknown_model", "x"), openai.NotFoundError, "model_not_found"),
        (GatewayError("unavailable", "x"), openai.InternalServerError, "service_unavailable"),
        (GatewayError("internal", "x"), openai.InternalServerError, None),
    ]
    for error, kind, code in errors:
        body = wire.error_body(error)

        def handle(_: httpx.Request, status: int = error.status, body: bytes = body) -> httpx.Response:
            return httpx.Response(status, content=body)

        with pytest.raises(kind) as caught:
            client(handle).chat.completions.create(model="policy", messages=HELLO)
        assert (caught.value.code, caught.value.param) == (code, error.param)


def test_an_error_on_a_stream_is_raised_by_the_client() -> None:
    def handle(_: httpx.Request) -> httpx.Response:
        body = wire.PING + wire.error_event(GatewayError("unavailable", "The gateway is being restarted."))
        return httpx.Response(200, content=body, headers={"content-type": "text/event-stream"})

    with pytest.raises(openai.APIError, match="being restarted"):
        list(client(handle).chat.completions.create(model="policy", messages=HELLO, stream=True))
