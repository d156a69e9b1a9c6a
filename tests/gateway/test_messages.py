"""When two messages mean the same, and what requests are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.gateway.errors import GatewayError
from gyre.gateway.messages import Message, ToolCall, argument_value, difference, same
from gyre.gateway.openai_chat import parse_message, parse_request
from tests.gateway.conftest import BASH

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text() | st.floats(allow_nan=False, width=32),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def said(arguments: str, *, id: str = "a", name: str = "bash", content: str = "") -> Message:
    return Message("assistant", content, None, (ToolCall(id, name, arguments),))


@given(st.dictionaries(st.text(), JSON, max_size=5), st.booleans())
def test_arguments_are_compared_as_values(value: dict[str, Any], ascii_only: bool) -> None:
    emitted = json.dumps(value)
    echoed = json.dumps(dict(reversed(value.items())), indent=2, ensure_ascii=ascii_only, sort_keys=True)
    assert difference(said(emitted), said(echoed, id="b")) is None


@pytest.mark.parametrize(
    ("emitted", "echoed", "ids", "why"),
    [
        ('{"a": 1000.0}', '{"a": 1000}', "ab", None),
        ('{"a": 1}', '{"a": true}', "aa", "arguments_edited"),
        ('{"a": 0}', '{"a": false}', "aa", "arguments_edited"),
        ('{"a": [1]}', '{"a": [true]}', "aa", "arguments_edited"),
        ('{"a": 1}', '{"a": 1, "replace_all": false}', "aa", None),  # an injected default
        ('{"a": 1}', '{"a": 1, "replace_all": false}', "ab", "arguments_edited"),
        ('{"text": "x \\n"}', '{"text": "x"}', "aa", None),  # trailing space stripped
        ('{"text": " x"}', '{"text": "x"}', "aa", "arguments_edited"),
        ('{"a": 1, "b": 2}', '{"a": 1}', "aa", "arguments_edited"),
        ("{not json", "{not json", "ab", None),
        ("{not json", "{not  json", "ab", "arguments_edited"),
        ("[" * 100_000, "[" * 100_000 + " ", "ab", "arguments_edited"),
    ],
)
def test_edited_arguments(emitted: str, echoed: str, ids: str, why: str | None) -> None:
    assert difference(said(emitted, id=ids[0]), said(echoed, id=ids[1])) == why


def test_whole_numbers_are_one_value() -> None:
    assert argument_value('{"a": [1.0, {"b": 2.5}]}') == {"a": [1, {"b": 2.5}]}


def test_other_differences() -> None:
    one = said("{}")
    assert difference(one, Message("assistant", "")) == "tool_calls_edited"
    assert difference(one, said("{}", name="other")) == "tool_calls_edited"
    assert difference(one, said("{}", content=" \n")) is None
    assert difference(one, said("{}", content="x")) == "content_edited"
    thinking = Message("assistant", "x", "because")
    assert difference(thinking, Message("assistant", "x")) is None
    assert difference(thinking, Message("assistant", "x", " because\n")) is None
    assert difference(thinking, Message("assistant", "x", "other")) == "reasoning_edited"


def test_content_parts_and_roles() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert same(parse_message(parts, "m"), parse_message({"role": "user", "content": "ab"}, "m"))
    assert parse_message({"role": "developer", "content": "x"}, "m").role == "system"
    thinks = parse_message({"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}, "m")
    assert (thinks.reasoning, thinks.content) == ("hm", "yes")


@pytest.mark.parametrize("version", ["2.1.220.a", "2.1.332.bcd"])
def test_the_billing_header_is_no_part_of_the_system_text(version: str) -> None:
    text = f"x-anthropic-billing-header: cc_version={version}; cch={hash(version)};\nYou are an agent."
    assert parse_message({"role": "system", "content": text}, "m").content == "You are an agent."


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"model": "gpt-4"}, "model", "does not exist"),
        ({"n": 2}, "n", "n must be 1"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "string"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "robot"),
        ({"messages": [{"role": ["user"], "content": ""}]}, "messages[0].role", "one of"),
        ({"messages": [5]}, "messages[0]", "object"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "text",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "id of the call"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls[0].function",
            "name",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0]", "name"),
        ({"tools": [BASH], "tool_choice": "always"}, "tool_choice", "none, auto, required or a tool"),
        ({"tools": [BASH], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"stop": [1]}, "stop", "strings"),
        ({"max_tokens": 0}, "max_tokens", "positive"),
        ({"max_completion_tokens": "many"}, "max_completion_tokens", "positive"),
        ({"response_format": {"type": "grammar"}}, "response_format", "one of"),
        ({"response_format": "json"}, "response_format", "one of"),
        ({"logprobs": True}, "logprobs", "not served"),
        ({"modalities": ["text", "audio"]}, "modalities", "text"),
        ({"continue_final_message": True}, "continue_final_message", "message of its own"),
        ({"functions": [{}]}, "functions", "tools"),
    ],
)
def test_refused_requests_name_the_field(change: dict[str, Any], param: str, words: str) -> None:
    good = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    parse_request(json.dumps(good).encode(), "policy")
    with pytest.raises(GatewayError, match=words) as caught:
        parse_request(json.dumps({**good, **change}).encode(), "policy")
    assert (caught.value.param, caught.value.status) == (param, 404 if param == "model" else 400)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": "\\ud800"}'])
def test_bodies_that_are_no_request(body: bytes) -> None:
    with pytest.raises(GatewayError) as caught:
        parse_request(body, "policy")
    assert caught.value.status in (400, 404)


@given(JSON)
def test_no_json_crashes_the_parser(value: Any) -> None:
    for body in (value, {"model": "policy", "messages": value}, {"model": "policy", "messages": [value]}):
        try:
            parse_request(json.dumps(body).encode(), "policy")
        except GatewayError as error:
            assert error.status < 500


def test_tool_choice_none_keeps_the_tools_in_the_prompt() -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "tools": [BASH], "tool_choice": "none"}
    request = parse_request(json.dumps(body).encode(), "policy")
    assert request.tools == (BASH,)
    assert not request.parse_tool_calls
