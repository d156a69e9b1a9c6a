"""OpenAI Responses: what goes out. A reply as items, whole or as events; a compaction; errors."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator
from typing import Any

import orjson

from gyre.gateway import openai_chat
from gyre.gateway.errors import GatewayError
from gyre.gateway.messages import Request, ToolCall
from gyre.gateway.result import Result

RAW_INPUT = "ctcraw_"
"""How the id of a custom tool's call begins when its input is the arguments as they were sampled, not their `input`."""
_SEALED = "gyre-compaction-"

Item = dict[str, Any]


def response(result: Result, model: str, request: Request) -> bytes:
    """The body of a whole answer; for a compaction of a history, the history to go on from."""
    items = _items(result, request)
    if request.options.get("compact") == "history":
        asked = (m.raw for m in request.messages[:-1] if m.raw.get("role") == "user")
        kept = [{"type": "message", **raw} for raw in asked]
        body = {"id": f"resp_{result.call_id}", "object": "response.compaction", "created_at": result.created}
        return orjson.dumps({**body, "output": [*kept, *items], "usage": _usage(result)})
    return orjson.dumps(_response(result, model, request, items, _status(result)))


def chunks(result: Result, model: str, request: Request) -> Iterator[bytes]:
    """The answer as events, in the order in which OpenAI sends them. Each item is whole in a single delta."""
    items = _items(result, request)
    number = 0

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return _event(kind, number - 1, **fields)

    begun = _response(result, model, request, [], "in_progress")
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(items):
        at = {"item_id": item["id"], "output_index": index}
        yield event("response.output_item.added", output_index=index, item=_opened(item))
        if item["type"] == "reasoning":
            part = item["summary"][0]
            at |= {"summary_index": 0}
            yield event("response.reasoning_summary_part.added", **at, part={**part, "text": ""})
            yield event("response.reasoning_summary_text.delta", **at, delta=part["text"])
            yield event("response.reasoning_summary_text.done", **at, text=part["text"])
            yield event("response.reasoning_summary_part.done", **at, part=part)
        elif item["type"] == "message":
            part = item["content"][0]
            at |= {"content_index": 0}
            yield event("response.content_part.added", **at, part={**part, "text": ""})
            yield event("response.output_text.delta", **at, delta=part["text"], logprobs=[])
            yield event("response.output_text.done", **at, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **at, part=part)
        elif item["type"] == "function_call":
            yield event("response.function_call_arguments.delta", **at, delta=item["arguments"])
            yield event("response.function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"])
        elif item["type"] == "custom_tool_call":
            yield event("response.custom_tool_call_input.delta", **at, delta=item["input"])
            yield event("response.custom_tool_call_input.done", **at, input=item["input"])
        yield event("response.output_item.done", output_index=index, item=item)
    status = _status(result)
    yield event(f"response.{status}", response=_response(result, model, request, items, status))


def error_body(error: GatewayError) -> bytes:
    """An error in OpenAI's shape."""
    return openai_chat.error_body(_worded(error))


def error_event(error: GatewayError) -> bytes:
    """An error on a stream that has begun."""
    details = orjson.loads(error_body(error))["error"]
    failed = {
        "id": "resp_failed", "object": "response", "status": "failed", "output": [],
        "error": {"code": details["code"] or details["type"], "message": details["message"]},
    }  # fmt: skip
    return _event("response.failed", 0, response=failed)


def _worded(error: GatewayError) -> GatewayError:
    """A context overflow as this API words it; harnesses go by its code, context_length_exceeded."""
    if error.overflow is None:
        return error
    tokens, context = error.overflow
    return GatewayError(
        error.kind,
        f"Your input exceeds the context window of this model ({tokens} tokens, {context} fit). "
        "Please adjust your input and try again.",
        "input",
        error.overflow,
    )


def seal(text: str) -> str:
    """A summary as `encrypted_content`: opaque to harnesses, and nothing that must be kept from them."""
    return _SEALED + base64.urlsafe_b64encode(text.encode()).decode()


def summary_of(sealed: Any) -> str | None:
    """The summary in a `seal`-ed text; None for anything else."""
    if not isinstance(sealed, str) or not sealed.startswith(_SEALED):
        return None
    try:
        return base64.urlsafe_b64decode(sealed.removeprefix(_SEALED)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def _event(kind: str, number: int, **fields: Any) -> bytes:
    body = orjson.dumps({"type": kind, "sequence_number": number, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


def _items(result: Result, request: Request) -> list[Item]:
    reply, call_id = result.reply, result.call_id
    if request.options.get("compact"):
        return [{"type": "compaction", "id": f"cmp_{call_id}_0", "encrypted_content": seal(reply.content)}]
    items: list[Item] = []
    if reply.reasoning:
        thought: Item = {"type": "reasoning", "id": f"rs_{call_id}_0"}
        thought["summary"] = [{"type": "summary_text", "text": reply.reasoning}]
        if "reasoning.encrypted_content" in (request.options.get("include") or ()):
            digest = hashlib.sha256(reply.reasoning.encode(errors="surrogatepass")).hexdigest()
            thought["encrypted_content"] = f"gyre-{call_id}-{digest}"
        items.append(thought)
    if reply.content or not reply.tool_calls:
        part = {"type": "output_text", "text": reply.content, "annotations": []}
        item = {"type": "message", "id": f"msg_{call_id}_{len(items)}", "role": "assistant", "content": [part]}
        items.append({**item, "status": _status(result)})
    known = {tool["function"]["name"] for tool in request.tools}
    for call in reply.tool_calls:
        custom = call.name in request.custom_tools
        items.append(_call(call, f"{call_id}_{len(items)}", custom=custom, known=call.name in known))
    return items


def _call(call: ToolCall, number: str, *, custom: bool, known: bool) -> Item:
    item: Item = {"call_id": call.id, "name": call.name, "status": "completed"}
    if known and "." in call.name:
        item["namespace"], _, item["name"] = call.name.partition(".")
    if not custom:
        return {"type": "function_call", "id": f"fc_{number}", **item, "arguments": call.arguments}
    text = _free_text(call.arguments)
    prefix, text = (RAW_INPUT, call.arguments) if text is None else ("ctc_", text)
    return {"type": "custom_tool_call", "id": prefix + number, **item, "input": text}


def _free_text(arguments: str) -> str | None:
    """The input of a custom tool; None where the policy did not give exactly one text."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return None
    if isinstance(value, dict) and list(value) == ["input"] and isinstance(value["input"], str):
        return value["input"]
    return None


def _opened(item: Item) -> Item:
    """An item as it begins, with nothing in it yet."""
    nothing: dict[str, Item] = {
        "reasoning": {"summary": []},
        "message": {"content": []},
        "function_call": {"arguments": ""},
        "custom_tool_call": {"input": ""},
    }
    status = {"status": "in_progress"} if "status" in item else {}
    return {**item, **nothing.get(item["type"], {}), **status}


def _status(result: Result) -> str:
    return "incomplete" if result.finish_reason == "length" else "completed"


def _response(result: Result, model: str, request: Request, items: list[Item], status: str) -> dict[str, Any]:
    options = request.options
    return {
        "id": f"resp_{result.call_id}",
        "object": "response",
        "created_at": result.created,
        "status": status,
        "model": model,
        "output": items,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "max_output_tokens": options.get("max_output_tokens"),
        "parallel_tool_calls": options.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": options.get("reasoning"),
        "store": False,
        "text": {"format": {"type": "text"}},
        "tool_choice": options.get("tool_choice", "auto"),
        "tools": [],  # not sent back: they are the largest part of a short call
        "truncation": "disabled",
        "usage": None if status == "in_progress" else _usage(result),
        "metadata": {},
    }


def _usage(result: Result) -> dict[str, Any]:
    return {
        "input_tokens": result.prompt_tokens,
        "input_tokens_details": {"cached_tokens": result.cached_tokens},
        "output_tokens": result.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},  # thinking is not counted apart
        "total_tokens": result.prompt_tokens + result.completion_tokens,
    }
