"""Anthropic Messages: requests to normal form and back from what is recorded, answers, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.gateway import anthropic_messages as wire
from gyre.gateway.errors import GatewayError, context_overflow
from gyre.gateway.messages import Message, Request, ToolCall, difference
from gyre.gateway.result import Result

TOOL = {"name": "Bash", "description": "Runs it.", "input_schema": {"type": "object", "properties": {}}}
CACHED = {"cache_control": {"type": "ephemeral"}}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def call(call_id: str, arguments: str) -> ToolCall:
    return ToolCall(call_id, "Bash", arguments)


def parse(**fields: Any) -> Request:
    body = {"model": "policy", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}], **fields}
    return wire.parse_request(json.dumps(body).encode(), "policy")


def result(reply: Message, finish: str = "stop", **more: Any) -> Result:
    fields = {"prompt_tokens": 100, "completion_tokens": 7, "cached_tokens": 60, **more}
    return Result(5, 1_700_000_000, reply, finish, **fields)


def test_a_request_of_claude_code() -> None:
    request = parse(
        system=[text("x-anthropic-billing-header: cc_version=1; cch=ab;"), text("You help.", **CACHED), text("More.")],
        messages=[
            {"role": "user", "content": [text("<system-reminder>a</system-reminder>\n"), text("Do it.", **CACHED)]},
            {"role": "system", "content": [text("Agents: none.")]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    text("I run it."),
                    {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}},
                    {"type": "tool_use", "id": "t2", "name": "Bash", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                    {"type": "tool_result", "tool_use_id": "t1", "content": [text("a"), text("b")], "is_error": False},
                    {"type": "tool_result", "tool_use_id": "t0"},
                    text("Go on."),
                ],
            },
        ],
        tools=[{**TOOL, **CACHED, "type": "custom"}],
        metadata={"user_id": "u"},
        thinking={"type": "adaptive"},
    )
    assert request.messages == (
        Message("system", "You help.\nMore."),
        Message("user", "<system-reminder>a</system-reminder>\n\nDo it."),
        Message("system", "Agents: none."),
        Message("assistant", "I run it.", "Hm.", (call("t1", '{"command":"ls"}'), call("t2", "{}"))),
        Message("tool", "Error:\nno", tool_call_id="t2"),
        Message("tool", "a\nb", tool_call_id="t1"),
        Message("tool", "", tool_call_id="t0"),
        Message("user", "Go on."),
    )  # fmt: skip
    function = {"name": "Bash", "description": "Runs it.", "parameters": TOOL["input_schema"]}
    assert request.tools == ({"type": "function", "function": function},)
    assert request.parse_tool_calls
    assert request.options["metadata"] == {"user_id": "u"}
    for message in request.messages:
        assert wire.parse_message(message.raw, "stored") == message


def test_a_string_is_a_single_text_block() -> None:
    whole = parse(system="S", messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    parts = parse(
        system=[text("S", **CACHED)],
        messages=[{"role": "user", "content": [text("a", **CACHED)]}, {"role": "assistant", "content": [text("b")]}],
    )
    assert whole.messages == parts.messages


def test_billing_headers_do_not_matter() -> None:
    """Case 4."""
    systems = [f"x-anthropic-billing-header: cc_version=2.1.220.{h}; cch={h};" for h in ("abc", "def")]
    asked = [parse(system=[text(s), text("You are Claude Code.")], tools=[TOOL]) for s in systems]
    assert asked[0].messages == asked[1].messages
    assert parse(system=[text(systems[0])]).messages == parse().messages


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}, "[image, image"),
        ({"type": "image", "source": {"type": "url", "url": "http://x"}}, "[image, url"),
        ({"type": "document", "source": {"type": "base64", "media_type": "text/pdf", "data": ""}}, "[document, text/p"),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}}, "words"),
        ({"type": "document"}, "[document, no source"),
        ({"type": "search_result", "title": "T", "source": "S", "content": [text("found")]}, "T S\nfound"),
        ({"type": "tool_reference", "tool_name": "Grep"}, "Grep"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("within", ["user", "tool_result"])
def test_what_is_not_text_is_named(block: dict[str, Any], said: str, within: str) -> None:
    """An image must not end a harness that only looked at one."""
    content = [block, text("after")]
    if within == "tool_result":
        content = [{"type": "tool_result", "tool_use_id": "t", "content": content}]
    [message] = parse(messages=[{"role": "user", "content": content}]).messages
    assert message.content.startswith(said)
    assert message.content.endswith("\nafter")
    assert wire.parse_message(message.raw, "stored") == message


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [3]}, "messages.0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages.0.content.0.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "messages.0.content.0.type"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": 3}]}
                ]
            },
            "messages.0.content.0.input",
        ),
        ({"system": 3}, "system"),
        ({"tools": 3}, "tools"),
        ({"tools": [{"input_schema": {}}]}, "tools.0"),
        ({"tools": [TOOL, {"name": "web_search", "type": "web_search_20250305"}]}, "tools.1"),
        ({"tool_choice": "auto"}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "Read"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"stop_sequences": "x"}, "stop_sequences"),
    ],
)
def test_a_bad_request_names_its_field(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(GatewayError) as caught:
        parse(**fields)
    assert (caught.value.kind, caught.value.param) == ("bad_request", where)
    assert caught.value.message.startswith(f"{where}: ")


def test_bodies_that_are_no_request() -> None:
    for body in (b"{nope", b"[]", b'"x"'):
        with pytest.raises(GatewayError) as caught:
            wire.parse_request(body, "policy")
        assert caught.value.kind == "bad_request"
    with pytest.raises(GatewayError, match="max_tokens: Field required"):
        wire.parse_request(b'{"model": "policy", "messages": [{"role": "user", "content": "x"}]}', "policy")
    assert wire.parse_count(b'{"model": "policy", "messages": [{"role": "user", "content": "x"}]}', "policy").messages
    with pytest.raises(GatewayError) as caught:
        wire.parse_request(b'{"model": "claude-opus-5"}', "policy")
    assert (caught.value.kind, caught.value.status) == ("unknown_model", 404)


@pytest.mark.parametrize("choice", [None, {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "Bash"}])
def test_a_forced_choice_is_recorded_and_not_enforced(choice: Any) -> None:
    request = parse(tools=[TOOL], tool_choice=choice)
    assert request.parse_tool_calls
    assert request.options["tool_choice"] == choice
    assert not parse(tools=[TOOL], tool_choice={"type": "none"}).parse_tool_calls
    assert not parse().parse_tool_calls


REPLY = Message(
    "assistant", "Text.", "Thought.", (ToolCall("t1", "Bash", '{"n": 1.50, "big": 123456789012345678901}'),)
)  # fmt: skip


def events(one: Result) -> list[dict[str, Any]]:
    made = [chunk.decode() for chunk in wire.chunks(one, "policy", parse())]
    out = []
    for chunk in made:
        event, data = chunk.removesuffix("\n\n").split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert event == f"event: {value['type']}"
        out.append(value)
    return out


def test_an_answer_whole_and_streamed() -> None:
    one = result(REPLY)
    whole = json.loads(wire.response(one, "policy", parse()))
    assert [b["type"] for b in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["stop_reason"] == "tool_use" and whole["stop_sequence"] is None
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] == 100
    assert usage["output_tokens"] == 7
    streamed = events(one)
    assert streamed[0]["message"]["id"] == whole["id"] == "msg_5"
    assert [e["type"] for e in streamed if e["type"].startswith("message")] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip
    starts = [e["content_block"]["type"] for e in streamed if e["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use"]
    [json_delta] = [
        e["delta"]["partial_json"] for e in streamed if e.get("delta", {}).get("type") == "input_json_delta"
    ]
    assert json_delta == REPLY.tool_calls[0].arguments, "number for number as it was sampled"
    assert streamed[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert streamed[-2]["usage"] == usage


@pytest.mark.parametrize(
    ("finish", "more", "reason"),
    [
        ("stop", {}, "end_turn"),
        ("length", {}, "max_tokens"),
        ("stop", {"stop_string": "END"}, "stop_sequence"),
        ("stop", {"cached_tokens": 500}, "end_turn"),
    ],
)
def test_stop_reasons(finish: str, more: dict[str, Any], reason: str) -> None:
    one = json.loads(wire.response(result(Message("assistant", "x"), finish, **more), "policy", parse()))
    assert (one["stop_reason"], one["stop_sequence"]) == (reason, more.get("stop_string"))
    assert one["usage"]["input_tokens"] >= 0
    assert one["usage"]["input_tokens"] + one["usage"]["cache_read_input_tokens"] == 100


def test_an_empty_answer_has_no_blocks() -> None:
    assert json.loads(wire.response(result(Message("assistant", "")), "policy", parse()))["content"] == []
    assert [e["type"] for e in events(result(Message("assistant", "")))] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip


def echo(one: Result) -> Message:
    """The answer as a harness that changes nothing sends it back."""
    content = json.loads(wire.response(one, "policy", parse()))["content"]
    return parse(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]).messages[1]


# Longer integers than 64 bits come back as floats, from JavaScript as from orjson: an honest fork.
integers = st.integers(-(2**63), 2**64 - 1)
scalars = integers | st.text() | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False)
odd = ["", "{}", "NaN", '{"a": NaN}', '{"a": "\\ud800"}', '{"a": 1', "[" * 2000, '{"a": 1, "a": 2}', "null"]
arguments = st.one_of(
    st.text(),
    st.dictionaries(st.text(max_size=5), scalars, max_size=4).map(json.dumps),
    (integers | st.floats() | st.lists(integers)).map(json.dumps),
    st.sampled_from(odd),
)


@settings(deadline=None)
@given(st.text(), st.none() | st.text(min_size=1), st.lists(arguments, max_size=3))
def test_whatever_was_sampled_comes_back_as_the_same_message(
    content: str, reasoning: str | None, args: list[str]
) -> None:
    """Cases 1 and 3: any text and any arguments, JSON or not, are a whole answer, and its echo matches."""
    calls = tuple(ToolCall(f"t{i}", "Bash", a) for i, a in enumerate(args))
    reply = Message("assistant", content, reasoning, calls)
    one = result(reply)
    assert difference(reply, echo(one)) is None
    for event in events(one):
        if event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            assert isinstance(json.loads(event["delta"]["partial_json"]), dict)


KEYS = ["role", "content", "type", "text", "input", "id", "name", "tool_use_id", "source", "thinking"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)
kinds = st.sampled_from(
    ["user", "assistant", "system", "text", "tool_use", "tool_result", "image", "thinking", "document"]
)


@settings(deadline=None)
@given(kinds, st.lists(st.tuples(kinds, json_values), max_size=4), json_values)
def test_no_message_makes_it_fail(role: str, blocks: list[tuple[str, Any]], other: Any) -> None:
    """Whatever a harness sends is messages that are read back from the record as they are, or an error with a field."""
    content: Any = [{**(v if isinstance(v, dict) else {"text": v}), "type": t} for t, v in blocks]
    for value in (content, other):
        try:
            request = parse(messages=[{"role": role, "content": value}, {"role": "user", "content": "x"}])
        except GatewayError as error:
            assert error.kind == "bad_request" and error.param is not None
            assert wire.error_body(error)
            continue
        for message in request.messages:
            assert wire.parse_message(message.raw, "stored") == message


def test_errors_have_anthropics_shape() -> None:
    assert json.loads(wire.error_body(context_overflow(205_000, 200_000))) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "prompt is too long: 205000 tokens > 200000 maximum"},
    }
    kinds = {
        "bad_request": "invalid_request_error", "unknown_model": "not_found_error", "forbidden": "permission_error",
        "unauthorized": "authentication_error", "not_found": "not_found_error", "too_large": "request_too_large",
        "unavailable": "overloaded_error", "internal": "api_error",
    }  # fmt: skip
    for kind, said in kinds.items():
        error = GatewayError(kind, "why")  # type: ignore[arg-type]
        assert json.loads(wire.error_body(error)) == {"type": "error", "error": {"type": said, "message": "why"}}
        assert wire.error_event(error).startswith(b"event: error\ndata: {")
