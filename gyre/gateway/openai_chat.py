"""OpenAI Chat Completions: request to normal form, answer to a response or SSE chunks, errors in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from gyre.gateway.errors import ErrorKind, GatewayError
from gyre.gateway.messages import Message, Request, ToolCall, system_text
from gyre.gateway.reading import Reading
from gyre.gateway.result import Result

API = "openai-chat"
PING = b": working\n\n"

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_ERROR_TYPES: dict[ErrorKind, tuple[str, str | None]] = {
    "bad_request": ("invalid_request_error", None),
    "context_overflow": ("invalid_request_error", "context_length_exceeded"),
    "unknown_model": ("invalid_request_error", "model_not_found"),
    "unauthorized": ("invalid_request_error", "invalid_api_key"),
    "forbidden": ("invalid_request_error", "rollout_over"),
    "misdirected": ("invalid_request_error", "misdirected_request"),
    "not_found": ("invalid_request_error", None),
    "too_large": ("invalid_request_error", "request_too_large"),
    "unavailable": ("server_error", "service_unavailable"),
    "internal": ("server_error", None),
}
# What would change what is sampled, or is not there to be sent.
_REFUSED = {
    "functions": "functions are not supported; use tools",
    "function_call": "functions are not supported; use tools and tool_choice",
    "logprobs": "log-probs are not served",
    "top_logprobs": "log-probs are not served",
    "audio": "the policy writes text only",
    "continue_final_message": "an answer is always a message of its own",
}
_UNSEEN = {"image_url": "image", "file": "file", "input_audio": "sound", "video_url": "video"}
# Kept with the call for the record; the run's own sampling parameters are used.
_OPTIONS = (
    "model",
    "temperature",
    "top_p",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "tool_choice",
    "parallel_tool_calls",
    "seed",
    "stream",
    "user",
    "response_format",
    "reasoning_effort",
)


def parse_request(body: bytes, model: str, reading: Reading | None = None) -> Request:
    """A request body in normal form. Raises GatewayError naming the field at fault.

    A forced tool_choice and a JSON response_format are taken for wishes: to enforce them would change the distribution
    that is sampled from.
    """
    reading = reading or Reading()
    data = json_object(body, reading)
    if data.get("model") != model:
        raise GatewayError("unknown_model", f"The model {data.get('model')!r} does not exist; use {model!r}.", "model")
    if data.get("n") not in (None, 1):
        raise GatewayError("bad_request", "n must be 1: one call samples one answer.", "n")
    for name, why in _REFUSED.items():
        if data.get(name):
            raise GatewayError("bad_request", f"{name}: {why}.", name)
    modalities = data.get("modalities")
    if modalities is not None and modalities != ["text"]:
        raise GatewayError("bad_request", "modalities must be ['text'].", "modalities")
    _response_format(data.get("response_format"))
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise GatewayError("bad_request", "messages must be a list of at least one message.", "messages")
    tools = _tools(data.get("tools"))
    tool_calls = tool_choice(data.get("tool_choice"), tools)
    stream_options = data.get("stream_options") or {}
    return Request(
        api=API,
        messages=tuple(reading.messages(messages, lambda m, i: [parse_message(m, f"messages[{i}]")])),
        tools=tools,
        parse_tool_calls=bool(tools) and tool_calls,
        stop=_stop(data.get("stop")),
        max_tokens=_max_tokens(data),
        stream=bool(data.get("stream")),
        stream_usage=isinstance(stream_options, dict) and bool(stream_options.get("include_usage")),
        options={k: data[k] for k in _OPTIONS if k in data},
    )


def json_object(body: bytes, reading: Reading | None = None) -> dict[str, Any]:
    """A request's body. Raises GatewayError where it is not a JSON object."""
    try:
        data = orjson.loads(body) if reading is None else reading.load(body)
    except orjson.JSONDecodeError as error:
        raise GatewayError("bad_request", f"We could not parse the JSON body of your request: {error}") from error
    if not isinstance(data, dict):
        raise GatewayError("bad_request", "The body of a request must be a JSON object.")
    return data


def parse_message(data: Any, where: str) -> Message:
    """One message in normal form; `where` names it in errors (GatewayError)."""
    if not isinstance(data, dict):
        raise GatewayError("bad_request", f"{where} must be an object.", where)
    said = data.get("role")
    role = _ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise GatewayError(
            "bad_request", f"{where}.role must be one of {sorted(_ROLES)}, got {said!r}.", f"{where}.role"
        )
    content = _content(data.get("content"), where, nullable=role == "assistant", blind=role == "tool")
    if role == "system":
        return Message("system", system_text(content), raw=data)
    if role == "user":
        return Message("user", content, raw=data)
    if role == "tool":
        call_id = data.get("tool_call_id")
        if not isinstance(call_id, str):
            raise GatewayError(
                "bad_request", f"{where}.tool_call_id must be the id of the call.", f"{where}.tool_call_id"
            )
        return Message("tool", content, tool_call_id=call_id, name=_optional_text(data.get("name")), raw=data)
    reasoning = data.get("reasoning_content") or data.get("reasoning")
    if not isinstance(reasoning, str):
        reasoning = None
    if reasoning is None and "</think>" in content:
        thought, _, content = content.partition("</think>")
        reasoning, content = thought.strip().removeprefix("<think>").strip(), content.lstrip("\n")
    calls = _tool_calls(data.get("tool_calls"), where)
    return Message("assistant", content, reasoning or None, calls, raw=data)


def _content(value: Any, where: str, *, nullable: bool, blind: bool) -> str:
    if isinstance(value, str):
        return value
    if value is None and nullable:
        return ""
    if isinstance(value, list):
        texts: list[str] = []
        for i, part in enumerate(value):
            text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
            if blind and isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind in _UNSEEN:
                text = unseen(_UNSEEN[kind])
            if not isinstance(text, str):
                raise GatewayError(
                    "bad_request", f"{where}.content[{i}] must be a text part: the policy reads text only.",
                    f"{where}.content[{i}]",
                )  # fmt: skip
            texts.append(text)
        return "".join(texts)
    raise GatewayError("bad_request", f"{where}.content must be a string or a list of parts.", f"{where}.content")


def unseen(what: str) -> str:
    """What the policy reads in the place of something that a tool returned and that is no text."""
    return f"[{what} left out: this model reads text only]"


def _tool_calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise GatewayError("bad_request", f"{where}.tool_calls must be a list.", f"{where}.tool_calls")
    calls: list[ToolCall] = []
    for i, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            field = f"{where}.tool_calls[{i}].function"
            raise GatewayError("bad_request", f"{field} must have a name and arguments.", field)
        arguments = function.get("arguments", "")
        if not isinstance(arguments, str):  # some harnesses echo the parsed value
            arguments = orjson.dumps(arguments).decode()
        calls.append(ToolCall(str(call.get("id") or ""), function["name"], arguments))
    return tuple(calls)


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise GatewayError("bad_request", "tools must be a list.", "tools")
    for i, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise GatewayError("bad_request", f"tools[{i}] must be a function with a name.", f"tools[{i}]")
    return tuple(value)


def tool_choice(value: Any, tools: Sequence[dict[str, Any]]) -> bool:
    """Whether calls may be made at all. A choice that forces one is a wish, but it must name a tool that is there."""
    if isinstance(value, dict):
        named = value.get("function", value).get("name") if isinstance(value.get("function", value), dict) else None
        known = {tool["function"]["name"] for tool in tools}
        if isinstance(named, str) and not any(named in (name, name.rpartition(".")[2]) for name in known):
            raise GatewayError(
                "bad_request", f"tool_choice names {named!r}, which is none of the tools.", "tool_choice"
            )
        return True
    if value is not None and (not isinstance(value, str) or value not in ("auto", "required", "none")):
        raise GatewayError("bad_request", "tool_choice must be none, auto, required or a tool.", "tool_choice")
    return bool(value != "none")


def _response_format(value: Any) -> None:
    kinds = ("text", "json_object", "json_schema")
    if value is not None and (not isinstance(value, dict) or value.get("type") not in kinds):
        raise GatewayError("bad_request", f"response_format.type must be one of {', '.join(kinds)}.", "response_format")


def _stop(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise GatewayError("bad_request", "stop must be a string or a list of strings.", "stop")
    return tuple(s for s in stops if s)


def _max_tokens(data: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if (value := data.get(name)) is not None:
            return positive_integer(value, name)
    return None


def positive_integer(value: Any, name: str) -> int:
    """A count of tokens. Raises GatewayError naming the field."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise GatewayError("bad_request", f"{name} must be a positive integer.", name)
    return value


def _optional_text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def response(result: Result, model: str, request: Request) -> bytes:
    """The body of a whole answer."""
    message = {"role": "assistant", "content": result.reply.content or None, "refusal": None, **_extras(result)}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(result)}
    return orjson.dumps({**_head(result, model, "chat.completion"), "choices": [choice], "usage": _usage(result)})


def chunks(result: Result, model: str, request: Request) -> Iterator[bytes]:
    """The answer as SSE events, `[DONE]` last. Each tool call is whole in its chunk, so that none is ever half."""
    head = _head(result, model, "chat.completion.chunk")
    usage = request.stream_usage

    def event(delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        body = {**head, "choices": [choice], **({"usage": None} if usage else {})}
        return b"data: " + orjson.dumps(body) + b"\n\n"

    yield event({"role": "assistant", "content": ""})
    if result.reply.reasoning:
        yield event({"reasoning_content": result.reply.reasoning})
    if result.reply.content:
        yield event({"content": result.reply.content})
    for index, call in enumerate(_wire_calls(result)):
        yield event({"tool_calls": [{"index": index, **call}]})
    yield event({}, _finish(result))
    if usage:
        yield b"data: " + orjson.dumps({**head, "choices": [], "usage": _usage(result)}) + b"\n\n"
    yield b"data: [DONE]\n\n"


def error_body(error: GatewayError) -> bytes:
    """An error in OpenAI's shape."""
    kind, code = _ERROR_TYPES[error.kind]
    return orjson.dumps({"error": {"message": error.message, "type": kind, "param": error.param, "code": code}})


def error_event(error: GatewayError) -> bytes:
    """An error on a stream that has begun."""
    return b"data: " + error_body(error) + b"\n\n"


def models(model: str) -> bytes:
    """The answer to `GET /models`."""
    return orjson.dumps(
        {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "gyre"}]}
    )


def _head(result: Result, model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{result.call_id}", "object": kind, "created": result.created, "model": model}


def _extras(result: Result) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if result.reply.reasoning:
        out["reasoning_content"] = result.reply.reasoning
    if result.reply.tool_calls:
        out["tool_calls"] = _wire_calls(result)
    return out


def _wire_calls(result: Result) -> list[dict[str, Any]]:
    return [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in result.reply.tool_calls
    ]


def _finish(result: Result) -> str:
    if result.finish_reason == "stop" and result.reply.tool_calls:
        return "tool_calls"
    return result.finish_reason


def _usage(result: Result) -> dict[str, Any]:
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "total_tokens": result.prompt_tokens + result.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
    }
