"""OpenAI Responses: items to messages and back, read by the official client; no engine is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.gateway import openai_responses as wire
from gyre.gateway.errors import GatewayError, context_overflow
from gyre.gateway.messages import Message, Request, ToolCall, difference
from gyre.gateway.openai_responses_answer import seal, summary_of
from gyre.gateway.reading import Reading
from gyre.gateway.result import Result
from tests.gateway.test_messages import JSON

FUNCTION = {"type": "function", "name": "exec", "description": "Run", "parameters": {"type": "object"}, "strict": False}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Patch", "format": GRAMMAR}
SPAWN = {"type": "function", "name": "spawn_agent", "description": "Spawn", "parameters": {"type": "object"}}
AGENTS = {"type": "namespace", "name": "agents_v1", "description": "Agents", "tools": [SPAWN]}
TOOLS = [FUNCTION, CUSTOM, AGENTS, {"type": "web_search"}, {"type": "local_shell"}]
ENCRYPTED = "reasoning.encrypted_content"


def parse(**fields: Any) -> Request:
    return wire.parse_request(json.dumps({"model": "policy", "input": "hi", **fields}).encode(), "policy")


def result(reply: Message, finish: str = "stop", call_id: int = 7) -> Result:
    return Result(call_id, 1700000000, reply, finish, prompt_tokens=100, completion_tokens=9, cached_tokens=64)


def replying(reply: Message, finish: str = "stop") -> Callable[[httpx.Request], httpx.Response]:
    """A server that gives this answer to whatever is asked."""

    def handle(http: httpx.Request) -> httpx.Response:
        request = wire.parse_request(http.content, "policy")
        made = result(reply, finish)
        if request.stream:
            body = b"".join(wire.chunks(made, "policy", request))
            return httpx.Response(200, content=body, headers={"content-type": "text/event-stream"})
        return httpx.Response(200, content=wire.response(made, "policy", request))

    return handle


def client(handle: Callable[[httpx.Request], httpx.Response]) -> openai.OpenAI:
    http = httpx.Client(transport=httpx.MockTransport(handle))
    return openai.OpenAI(base_url="http://gateway/v1", api_key="k", http_client=http, max_retries=0)


HISTORY = [
    {"type": "message", "role": "developer", "content": "rules"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "do it"}], "id": "msg_x"},
    {"role": "assistant", "content": "done"},
    {"role": "user", "content": "more"},
]
CALLS = (
    ToolCall("call_1", "exec", '{"cmd": "ls"}'),
    ToolCall("call_2", "apply_patch", '{"input": "*** Begin Patch"}'),
    ToolCall("call_3", "agents_v1.spawn_agent", '{"message": "go"}'),
    ToolCall("call_4", "no_such.tool", "{}"),
)
REPLY = Message("assistant", "Doing it.\n", "I think.", CALLS)


def items(reply: Message, finish: str = "stop", call_id: int = 7, **fields: Any) -> list[dict[str, Any]]:
    request = parse(**{"tools": TOOLS, "include": [ENCRYPTED], **fields})
    output: list[dict[str, Any]] = json.loads(wire.response(result(reply, finish, call_id), "policy", request))[
        "output"
    ]
    return output


def test_a_whole_answer() -> None:
    got = client(replying(REPLY)).responses.create(model="policy", input="hi", tools=TOOLS, include=[ENCRYPTED])
    assert got.id == "resp_7" and got.status == "completed" and got.output_text == "Doing it.\n"
    assert [o.type for o in got.output] == [
        "reasoning", "message", "function_call", "custom_tool_call", "function_call", "function_call",
    ]  # fmt: skip
    thought, _, run, patch, spawn, unknown = got.output
    assert thought.type == "reasoning" and thought.summary[0].text == "I think." and thought.encrypted_content
    assert run.type == "function_call" and (run.name, run.call_id, run.arguments) == ("exec", "call_1", '{"cmd": "ls"}')
    assert patch.type == "custom_tool_call" and patch.input == "*** Begin Patch" and patch.call_id == "call_2"
    assert spawn.to_dict()["namespace"] == "agents_v1" and spawn.to_dict()["name"] == "spawn_agent"
    assert unknown.to_dict()["name"] == "no_such.tool" and "namespace" not in unknown.to_dict()
    assert got.usage is not None and got.usage.input_tokens_details.cached_tokens == 64
    assert (got.usage.input_tokens, got.usage.output_tokens, got.usage.total_tokens) == (100, 9, 109)
    assert got.tool_choice == "auto" and got.parallel_tool_calls is True


def test_a_stream_ends_with_what_a_whole_answer_says() -> None:
    with client(replying(REPLY)).responses.stream(model="policy", input="hi", tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [e.type for e in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert [e.sequence_number for e in events] == list(range(len(events)))
    for kind in ("reasoning_summary_text", "output_text", "function_call_arguments", "custom_tool_call_input"):
        assert f"response.{kind}.delta" in kinds and f"response.{kind}.done" in kinds
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 6
    whole = client(replying(REPLY)).responses.create(model="policy", input="hi", tools=TOOLS)
    parsed = {"parsed", "parsed_arguments"}  # what the client's helper adds
    said = [{k: v for k, v in o.to_dict().items() if k not in parsed} for o in final.output]
    for item in said:
        for part in item.get("content") or []:
            part.pop("parsed", None)
    assert said == [o.to_dict() for o in whole.output]
    assert final.output_text == whole.output_text and final.usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_cut_short_is_incomplete(stream: bool) -> None:
    handle = replying(Message("assistant", "half a"), "length")
    if stream:
        events = list(client(handle).responses.create(model="policy", input="hi", stream=True))
        assert events[-1].type == "response.incomplete"
        got = events[-1].response
    else:
        got = client(handle).responses.create(model="policy", input="hi")
    assert got.status == "incomplete" and got.incomplete_details is not None
    assert got.incomplete_details.reason == "max_output_tokens" and got.output_text == "half a"


def test_an_answer_without_anything_is_an_empty_message() -> None:
    assert [(o["type"], o["content"][0]["text"]) for o in items(Message("assistant", ""))] == [("message", "")]
    assert [o["type"] for o in items(Message("assistant", "", "hm"))] == ["reasoning", "message"]
    assert [o["type"] for o in items(Message("assistant", "", None, CALLS[:1]))] == ["function_call"]


def test_encrypted_content_only_where_it_is_asked_for() -> None:
    assert "encrypted_content" not in items(REPLY, include=[])[0]
    assert items(REPLY)[0]["encrypted_content"] == items(REPLY)[0]["encrypted_content"]
    assert "I think" not in items(REPLY)[0]["encrypted_content"]


TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
ARGUMENTS = st.one_of(
    st.builds(lambda s: json.dumps({"input": s}), TEXT), st.builds(lambda v: json.dumps(v), JSON), TEXT
)
NAMES = st.sampled_from(["exec", "apply_patch", "agents_v1.spawn_agent", "a.b", "nope"])
REPLIES = st.builds(
    lambda content, thought, calls: Message(
        "assistant", content, thought or None, tuple(ToolCall(f"c{i}", n, a) for i, (n, a) in enumerate(calls))
    ),
    TEXT, st.none() | TEXT, st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3),
)  # fmt: skip


@settings(deadline=None)
@given(REPLIES, st.sampled_from(["none", "ids", "content", "interleaved"]))
def test_what_is_emitted_comes_back_as_the_same_message(reply: Message, loss: str) -> None:
    """Codex's round trip: the items as they were, outputs behind them; other harnesses lose ids or move outputs."""
    said = items(reply)
    if loss == "ids":
        for item in said:
            if item["type"] != "custom_tool_call":  # whose id says how its input is to be read
                del item["id"]
    if loss == "content":  # only encrypted_content comes back of the reasoning
        said = [{**i, "summary": []} if i["type"] == "reasoning" else i for i in said]
    outputs = [
        {"type": i["type"] + "_output", "call_id": i["call_id"], "output": "out"} for i in said if "call_id" in i
    ]
    history: list[dict[str, Any]] = []
    for item in said:
        history.append(item)
        if loss == "interleaved" and "call_id" in item:
            history.append(outputs.pop(0))
    history += outputs
    user = {"role": "user", "content": "hi"}
    messages = parse(input=[user, *history, user], tools=TOOLS).messages
    assert [m.role for m in messages] == ["user", "assistant", *["tool"] * len(reply.tool_calls), "user"]
    assert difference(reply, messages[1]) is None
    assert [c.id for c in messages[1].tool_calls] == [m.tool_call_id for m in messages[2:-1]]


def test_two_answers_side_by_side_stay_two() -> None:
    a, b = items(Message("assistant", "a", "x"), call_id=1), items(Message("assistant", "b"), call_id=2)
    assert [m.content for m in parse(input=[{"role": "user", "content": "hi"}, *a, *b]).messages] == ["hi", "a", "b"]
    for item in a + b:
        del item["id"]
    assert [m.content for m in parse(input=[*b, *a]).messages] == ["b", "a"], "new reasoning begins another turn"


def test_every_raw_gives_its_message_again() -> None:
    """What Postgres has of a call is parsed anew after a restart."""
    said = items(REPLY)
    request = parse(
        instructions="Be good.",
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            {"role": "user", "content": "hi"},
            *said,
            {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "out"}]},
            {"type": "custom_tool_call_output", "call_id": "call_2", "output": "patched"},
            {"type": "compaction", "encrypted_content": seal("what was"), "id": "cmp_1_0"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "yes", "annotations": []}]},
        ],
    )
    assert [m.role for m in request.messages] == [
        "system", "system", "user", "assistant", "tool", "tool", "user", "assistant",
    ]  # fmt: skip
    assert request.messages[6].content.endswith("what was")
    again = tuple(wire.parse_message(json.loads(json.dumps(m.raw)), "raw") for m in request.messages)
    assert again == request.messages


def test_what_came_before_is_not_read_again() -> None:
    reading = Reading()
    said = [*HISTORY[:2], *items(REPLY), {"type": "function_call_output", "call_id": "call_1", "output": "out"}]

    def read(given: list[dict[str, Any]]) -> Request:
        body = {"model": "policy", "instructions": "i", "input": given}
        return wire.parse_request(json.dumps(body).encode(), "policy", reading)

    first, longer = read(said), read([*said, HISTORY[3]])
    assert first.messages == parse(instructions="i", input=said).messages
    assert all(a is b for a, b in zip(first.messages, longer.messages, strict=False))
    assert [m.content for m in longer.messages[len(first.messages) :]] == ["more"]


def test_tools_of_every_type() -> None:
    request = parse(tools=TOOLS)
    functions = {t["function"]["name"]: t["function"] for t in request.tools}
    assert list(functions) == ["exec", "apply_patch", "agents_v1.spawn_agent"]
    assert request.custom_tools == {"apply_patch"}
    schema = functions["apply_patch"]["parameters"]
    assert schema["required"] == ["input"] and GRAMMAR["definition"] in schema["properties"]["input"]["description"]
    assert request.parse_tool_calls and not parse(tools=TOOLS, tool_choice="none").parse_tool_calls
    for choice in ("required", {"type": "function", "name": "exec"}, {"type": "custom", "name": "apply_patch"}):
        assert parse(tools=TOOLS, tool_choice=choice).parse_tool_calls
    assert not parse(tools=[{"type": "web_search"}]).parse_tool_calls


def test_images_that_a_tool_returns_are_named_in_their_place() -> None:
    output = [{"type": "input_text", "text": "see "}, {"type": "input_image", "image_url": "data:,"}]
    [message] = parse(input=[{"type": "function_call_output", "call_id": "c", "output": output}]).messages
    assert message.content == "see [image left out: this model reads text only]"


def message(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"input": [{"type": "message", "role": role, "content": list(content)}]}


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"model": "gpt-5"}, "model", "does not exist"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole history"),
        ({"conversation": "conv_1"}, "conversation", "whole history"),
        ({"background": True}, "background", "not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "template"),
        ({"top_logprobs": 3}, "top_logprobs", "not served"),
        ({"include": ["message.output_text.logprobs"]}, "include", "not served"),
        ({"include": "x"}, "include", "list"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"instructions": ["x"]}, "instructions", "text"),
        ({"input": None}, "input", "at least one item"),
        ({"input": []}, "input", "at least one item"),
        ({"input": 5}, "input", "list of items"),
        ({"input": [5]}, "input[0]", "item"),
        ({"input": [{"items": []}]}, "input[0]", "item"),
        ({"input": [{"role": "robot", "content": ""}]}, "input[0].role", "robot"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "web_search_call"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference"),
        (
            {"input": [{"type": "compaction", "encrypted_content": "gAAA"}]},
            "input[0].encrypted_content",
            "not from here",
        ),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": ""}]}, "input[0].name", "text"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "text"),
        (message({"type": "input_image", "image_url": "x"}), "input[0].content[0]", "text only"),
        (message({"type": "input_file", "file_id": "x"}), "input[0].content[0]", "text only"),
        (message({"type": ["input_text"], "text": "x"}), "input[0].content[0]", "text only"),
        ({"tools": {}}, "tools", "list"),
        ({"tools": [5]}, "tools[0]", "object"),
        ({"tools": [{"type": "function", "name": "a.b"}]}, "tools[0].name", "letters"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools", "list"),
        ({"tools": [{**AGENTS, "tools": [AGENTS]}]}, "tools[0].tools[0].tools", "list"),
        ({"tools": [FUNCTION], "tool_choice": "always"}, "tool_choice", "none, auto"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "'x'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "positive"),
    ],
)
def test_refused_requests_name_the_field(change: dict[str, Any], param: str, words: str) -> None:
    parse()
    with pytest.raises(GatewayError, match=words) as caught:
        parse(**change)
    assert (caught.value.param, caught.value.status) == (param, 404 if param == "model" else 400)


@settings(deadline=None)
@given(JSON)
def test_no_json_crashes_the_parser(value: Any) -> None:
    kinds = ("message", "reasoning", "function_call", "custom_tool_call", "function_call_output", "compaction")
    inputs = [value, [value], *([{"type": kind, "role": "assistant", "content": value, "summary": value, "input": value,
                                  "name": value, "call_id": value, "arguments": value, "output": value}]
                                for kind in kinds)]  # fmt: skip
    for body in [value, *({"model": "policy", "input": i, "tools": [value]} for i in inputs),
                 *({"model": "policy", "input": i} for i in inputs), {"model": "policy", "input": "x", "tools": value},
                 {"model": "policy", "input": "x", "tool_choice": value, "include": value, "text": value}]:  # fmt: skip
        try:
            wire.parse_request(json.dumps(body).encode(), "policy")
        except GatewayError as error:
            assert error.status < 500


def test_an_overflow_is_known_by_its_code() -> None:
    """Codex goes by the code, and by OpenAI's words where there is none."""

    def handle(_: httpx.Request) -> httpx.Response:
        return httpx.Response(400, content=wire.error_body(context_overflow(3000, 2048)))

    with pytest.raises(openai.BadRequestError, match="exceeds the context window of this model") as caught:
        client(handle).responses.create(model="policy", input="hi")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


def test_an_error_on_a_stream_is_a_failed_response() -> None:
    def handle(_: httpx.Request) -> httpx.Response:
        body = wire.PING + wire.error_event(GatewayError("unavailable", "The gateway is being restarted."))
        return httpx.Response(200, content=body, headers={"content-type": "text/event-stream"})

    [event] = client(handle).responses.create(model="policy", input="hi", stream=True)
    assert event.type == "response.failed" and event.response.error is not None
    assert event.response.error.message == "The gateway is being restarted."
    body = json.loads(wire.error_event(context_overflow(9, 8)).partition(b"data: ")[2])
    assert body["response"]["error"]["code"] == "context_length_exceeded"


def test_compaction_of_a_history() -> None:
    body = json.dumps({"model": "policy", "input": HISTORY, "instructions": "i", "tools": TOOLS}).encode()
    request = wire.parse_compact(body, "policy")
    assert [m.role for m in request.messages] == ["system", "system", "user", "assistant", "user", "user"]
    assert request.messages[-1].content == wire.COMPACT_PROMPT and not request.stream and not request.parse_tool_calls
    answer = json.loads(wire.response(result(Message("assistant", "They did it.", "hm")), "policy", request))
    assert answer["object"] == "response.compaction" and answer["usage"]["total_tokens"] == 109
    assert answer["output"][:-1] == [HISTORY[1], {"type": "message", **HISTORY[3]}]
    assert answer["output"][-1]["type"] == "compaction" and "They" not in answer["output"][-1]["encrypted_content"]
    later = parse(input=answer["output"])
    assert [m.content for m in later.messages] == ["do it", "more", wire.SUMMARY_PREFIX + "They did it."]
    again = wire.parse_compact(json.dumps({"model": "policy", "input": answer["output"]}).encode(), "policy")
    shorter = json.loads(wire.response(result(Message("assistant", "All.")), "policy", again))["output"]
    assert [o["type"] for o in shorter] == ["message", "message", "compaction"], "one summary, the newest"


def test_compaction_by_an_item_of_the_input() -> None:
    request = parse(input=[*HISTORY, {"type": "compaction_trigger"}], stream=True)
    assert request.messages[-1].content == wire.COMPACT_PROMPT
    events = b"".join(wire.chunks(result(Message("assistant", "They did it.")), "policy", request)).split(b"\n\n")
    done = [json.loads(e.partition(b"data: ")[2]) for e in events if b"output_item.done" in e]
    assert [d["item"]["type"] for d in done] == ["compaction"]
    assert summary_of(done[0]["item"]["encrypted_content"]) == "They did it."


@settings(deadline=None)
@given(st.text())
def test_only_what_was_sealed_here_is_read(text: str) -> None:
    assert summary_of(text) is None or text.startswith("gyre-compaction-")
    if text.isprintable():
        assert summary_of(seal(text)) == text
