"""Anthropic Messages: request to normal form, answer to a response or SSE events, errors in Anthropic's shape.

What the API has and the policy has not: images and documents are replaced by a line that says so (a refusal would end
the harness where it only looked at a picture), and a forced tool choice or an output format is recorded and not
enforced (enforcing it would change what is sampled). Server tools are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from gyre.gateway.errors import ErrorKind, GatewayError
from gyre.gateway.messages import Message, Request, ToolCall, system_text
from gyre.gateway.reading import Reading
from gyre.gateway.result import Result

API = "anthropic-messages"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'

SIGNATURE = "Z3lyZQ=="
"""Of every thinking block. It says nothing: what comes back is compared with what was emitted."""
RAW_ARGUMENTS = "_raw_arguments"
"""The one key of a tool input whose arguments, as sampled, are no JSON object: they are its value, as text."""

_ERROR_TYPES: dict[ErrorKind, str] = {
    "bad_request": "invalid_request_error",
    "context_overflow": "invalid_request_error",
    "unknown_model": "not_found_error",
    "unauthorized": "authentication_error",
    "forbidden": "permission_error",
    "misdirected": "invalid_request_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "unavailable": "overloaded_error",
    "internal": "api_error",
}
# Kept with the call for the record; the run's own sampling parameters are used.
_OPTIONS = (
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop_sequences",
    "stream",
    "tool_choice",
    "thinking",
    "metadata",
    "service_tier",
    "context_management",
    "output_config",
    "output_format",
)


def parse_request(body: bytes, model: str, reading: Reading | None = None) -> Request:
    """A request body in normal form. Raises GatewayError naming the field at fault."""
    reading = reading or Reading()
    data = _parse(body, model, reading)
    if "max_tokens" not in data:
        raise _bad("max_tokens", "Field required")
    return _request(data, reading)


def parse_count(body: bytes, model: str) -> Request:
    """The body of a `count_tokens` request in normal form; it has no `max_tokens`. Raises GatewayError."""
    reading = Reading()
    return _request(_parse(body, model, reading), reading)


def _parse(body: bytes, model: str, reading: Reading) -> dict[str, Any]:
    try:
        data = reading.load(body)
    except orjson.JSONDecodeError as error:
        raise GatewayError("bad_request", f"The request body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise GatewayError("bad_request", "The body of a request must be a JSON object.")
    if data.get("model") != model:
        raise GatewayError("unknown_model", f"model: {data.get('model')!r} does not exist; use {model!r}.", "model")
    return data


def _request(data: dict[str, Any], reading: Reading) -> Request:
    given = data.get("messages")
    if not isinstance(given, list) or not given:
        raise _bad("messages", "at least one message is required")
    messages: list[Message] = []
    if (system := data.get("system")) and (said := _system(system, "system")).content:
        messages.append(said)
    messages += reading.messages(given, lambda message, i: _messages(message, f"messages.{i}"))
    if not any(m.role != "system" for m in messages):
        raise _bad("messages", "at least one message that is not empty is required")
    tools = _tools(data.get("tools"))
    max_tokens = data.get("max_tokens")
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1):
        raise _bad("max_tokens", "must be a positive integer")
    return Request(
        api=API,
        messages=tuple(messages),
        tools=tools,
        parse_tool_calls=_calls_allowed(data.get("tool_choice"), tools) and bool(tools),
        stop=_stop(data.get("stop_sequences")),
        max_tokens=max_tokens,
        stream=bool(data.get("stream")),
        stream_usage=True,
        options={k: data[k] for k in _OPTIONS if k in data},
    )


def parse_message(data: Any, where: str) -> Message:
    """The one message that `data` is in normal form; `where` names it in errors (GatewayError)."""
    parsed = _messages(data, where)
    if len(parsed) != 1:
        raise _bad(where, f"must be one message, is {len(parsed)}")
    return parsed[0]


def _messages(data: Any, where: str) -> list[Message]:
    """A message of the API as normal ones: each tool result, and each run of other blocks, is a message of its own."""
    if not isinstance(data, dict):
        raise _bad(where, "must be an object")
    role, content = data.get("role"), data.get("content")
    if role == "system":
        return [_system(content, f"{where}.content")]
    if role == "assistant":
        return [_assistant(data, f"{where}.content")]
    if role != "user":
        raise _bad(f"{where}.role", f"must be user, assistant or system, got {role!r}")
    if isinstance(content, str):
        return [Message("user", content, raw=data)]
    runs: list[tuple[str, list[Any]]] = []
    for i, block in enumerate(_blocks(content, f"{where}.content")):
        if block["type"] == "tool_result":
            runs.append((f"{where}.content.{i}", [block]))
        elif runs and runs[-1][1][0]["type"] != "tool_result":
            runs[-1][1].append(block)
        else:
            runs.append((f"{where}.content.{i}", [block]))
    return [_user(blocks, place) for place, blocks in runs]


def _user(blocks: list[Any], where: str) -> Message:
    raw = {"role": "user", "content": blocks}
    block = blocks[0]
    if block["type"] != "tool_result":
        return Message("user", _text(blocks, where), raw=raw)
    if not isinstance(call_id := block.get("tool_use_id"), str):
        raise _bad(f"{where}.tool_use_id", "must be the id of a tool_use block")
    content = block.get("content")
    text = content if isinstance(content, str) else _text(_blocks(content or [], f"{where}.content"), where)
    if block.get("is_error"):
        text = f"Error:\n{text}"
    return Message("tool", text, tool_call_id=call_id, raw=raw)


def _assistant(data: dict[str, Any], where: str) -> Message:
    content = data.get("content")
    if isinstance(content, str):
        return Message("assistant", content, raw=data)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(_blocks(content, where)):
        place = f"{where}.{i}"
        match block["type"]:
            case "text":
                texts.append(_string(block, "text", place))
            case "thinking":
                thoughts.append(_string(block, "thinking", place))
            case "redacted_thinking":
                pass  # another model's; nothing in it can be read
            case "tool_use":
                calls.append(_tool_call(block, place))
            case other:
                raise _bad(f"{place}.type", f"an assistant block of type {other!r} is not supported")
    reasoning = "\n".join(t for t in thoughts if t)
    return Message("assistant", "\n".join(t for t in texts if t), reasoning or None, tuple(calls), raw=data)


def _tool_call(block: dict[str, Any], where: str) -> ToolCall:
    value = block.get("input", {})
    if not isinstance(value, dict):
        raise _bad(f"{where}.input", "must be an object")
    if value.keys() == {RAW_ARGUMENTS} and isinstance(value[RAW_ARGUMENTS], str):
        arguments = value[RAW_ARGUMENTS]
    else:
        arguments = orjson.dumps(value).decode()
    return ToolCall(_string(block, "id", where), _string(block, "name", where), arguments)


def _system(value: Any, where: str) -> Message:
    raw = {"role": "system", "content": value}
    if isinstance(value, str):
        return Message("system", system_text(value), raw=raw)
    return Message("system", _text(_blocks(value, where), where, system=True), raw=raw)


def _blocks(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise _bad(where, "must be a string or a list of blocks")
    for i, block in enumerate(value):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise _bad(f"{where}.{i}", "must be a block with a type")
    return value


def _text(blocks: list[dict[str, Any]], where: str, *, system: bool = False) -> str:
    """The text of user, system or tool-result blocks, a line break between them; what is not text is named."""
    texts: list[str] = []
    for i, block in enumerate(blocks):
        match block["type"]:
            case "text":
                text = _string(block, "text", f"{where}.{i}")
                texts.append(system_text(text) if system else text)
            case "image" | "document" if not system:
                texts.append(_unread(block))
            case "search_result" if not system:
                inner = _blocks(block.get("content"), f"{where}.{i}.content")
                head = " ".join(str(block[k]) for k in ("title", "source") if isinstance(block.get(k), str))
                texts += [head, _text(inner, f"{where}.{i}.content")]
            case "tool_reference" if not system:
                texts.append(_string(block, "tool_name", f"{where}.{i}"))
            case other:
                raise _bad(f"{where}.{i}.type", f"a block of type {other!r} is not supported")
    return "\n".join(t for t in texts if t)


def _unread(block: dict[str, Any]) -> str:
    """What stands for an image or a document; a document of plain text stands for itself."""
    source = block.get("source")
    if not isinstance(source, dict):
        source = {}
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return str(source["data"])
    what = source.get("media_type") or source.get("type") or "no source"
    return f"[{block['type']}, {what}: it cannot be shown, this model reads text only]"


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _bad("tools", "must be a list")
    return tuple(_tool(tool, f"tools.{i}") for i, tool in enumerate(value))


def _tool(tool: Any, where: str) -> dict[str, Any]:
    """A tool as an OpenAI tool object, which is what templates render."""
    if not isinstance(tool, dict) or not isinstance(name := tool.get("name"), str):
        raise _bad(where, "must be a tool with a name")
    if tool.get("type") not in (None, "custom") or not isinstance(schema := tool.get("input_schema"), dict):
        kind = tool.get("type", "custom")
        raise _bad(where, f"{name}: only custom tools with an input_schema are supported, this is of type {kind!r}")
    function = {"name": name, "description": tool.get("description") or "", "parameters": schema}
    return {"type": "function", "function": function}


def _calls_allowed(choice: Any, tools: tuple[dict[str, Any], ...]) -> bool:
    if choice is None:
        return True
    kind: Any = choice.get("type") if isinstance(choice, dict) else None
    if kind not in ("auto", "any", "tool", "none"):
        raise _bad("tool_choice.type", f"must be auto, any, tool or none, got {kind!r}")
    if kind == "tool" and choice.get("name") not in [tool["function"]["name"] for tool in tools]:
        raise _bad("tool_choice.name", f"must be one of the tools, got {choice.get('name')!r}")
    return bool(kind != "none")


def _stop(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise _bad("stop_sequences", "must be a list of strings")
    return tuple(s for s in stops if s)


def _string(block: dict[str, Any], key: str, where: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise _bad(f"{where}.{key}", "must be a string")
    return value


def _bad(where: str, what: str) -> GatewayError:
    return GatewayError("bad_request", f"{where}: {what}", where)


def response(result: Result, model: str, request: Request) -> bytes:
    """The body of a whole answer."""
    return orjson.dumps({**_head(result, model), "content": list(_content(result)), **_end(result)})


def chunks(result: Result, model: str, request: Request) -> Iterator[bytes]:
    """The answer as SSE events. Each block comes in one delta, so that none is ever half."""

    def event(kind: str, **fields: Any) -> bytes:
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"

    unfinished = {"stop_reason": None, "stop_sequence": None}
    usage = {**_usage(result), "output_tokens": 1}
    yield event("message_start", message={**_head(result, model), "content": [], **unfinished, "usage": usage})
    for index, block in enumerate(_content(result)):
        match block["type"]:
            case "thinking":
                empty = {**block, "thinking": "", "signature": ""}
                deltas = [
                    {"type": "thinking_delta", "thinking": block["thinking"]},
                    {"type": "signature_delta", "signature": block["signature"]},
                ]
            case "text":
                empty, deltas = {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
            case _:
                arguments = orjson.dumps(block["input"]).decode()
                empty, deltas = {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
        yield event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    end = _end(result)
    usage = end.pop("usage")
    yield event("message_delta", delta=end, usage=usage)
    yield event("message_stop")


def _head(result: Result, model: str) -> dict[str, Any]:
    return {"id": f"msg_{result.call_id}", "type": "message", "role": "assistant", "model": model}


def _content(result: Result) -> Iterator[dict[str, Any]]:
    reply = result.reply
    if reply.reasoning:
        yield {"type": "thinking", "thinking": reply.reasoning, "signature": SIGNATURE}
    if reply.content:
        yield {"type": "text", "text": reply.content}
    for call in reply.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}


def _input(arguments: str) -> Any:
    """A tool's input as it was sampled, number for number; always an object, as the API has it."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        value = None
    if isinstance(value, dict):
        return orjson.Fragment(arguments)
    return {RAW_ARGUMENTS: arguments}


def _end(result: Result) -> dict[str, Any]:
    if result.stop_string is not None:
        reason = "stop_sequence"
    elif result.finish_reason == "length":
        reason = "max_tokens"
    elif result.reply.tool_calls:
        reason = "tool_use"
    else:
        reason = "end_turn"
    return {"stop_reason": reason, "stop_sequence": result.stop_string, "usage": _usage(result)}


def _usage(result: Result) -> dict[str, int]:
    """`input_tokens` are those that the engine's prefix cache did not have: with the cached ones, the whole prompt."""
    cached = min(result.cached_tokens, result.prompt_tokens)
    return {
        "input_tokens": result.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": result.completion_tokens,
    }


def token_count(tokens: int) -> bytes:
    """The answer to `count_tokens`."""
    return orjson.dumps({"input_tokens": tokens})


def error_body(error: GatewayError) -> bytes:
    """An error in Anthropic's shape. Claude Code compacts on an overflow worded like this."""
    message = error.message
    if error.overflow is not None:
        tokens, most = error.overflow
        message = f"prompt is too long: {tokens} tokens > {most} maximum"
    return orjson.dumps({"type": "error", "error": {"type": _ERROR_TYPES[error.kind], "message": message}})


def error_event(error: GatewayError) -> bytes:
    """An error on a stream that has begun."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"


def models(model: str, context: int, max_tokens: int) -> bytes:
    """The answer to `GET /v1/models`."""
    listed = [_model(model, context, max_tokens)]
    return orjson.dumps({"data": listed, "has_more": False, "first_id": model, "last_id": model})


def one_model(model: str, context: int, max_tokens: int) -> bytes:
    """The answer to `GET /v1/models/<id>`."""
    return orjson.dumps(_model(model, context, max_tokens))


def _model(model: str, context: int, max_tokens: int) -> dict[str, Any]:
    return {
        "type": "model",
        "id": model,
        "display_name": model,
        "created_at": "1970-01-01T00:00:00Z",
        "max_input_tokens": context,
        "max_tokens": max_tokens,
    }
