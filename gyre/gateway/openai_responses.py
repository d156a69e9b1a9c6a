"""OpenAI Responses: what comes in, to normal form. What goes out is in openai_responses_answer.

An assistant turn is several items on the wire (reasoning, message, calls) and one message here. Nothing is kept for
retrieval: a request brings its whole history.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson

from gyre.gateway import openai_chat
from gyre.gateway.errors import GatewayError
from gyre.gateway.messages import Message, Request, ToolCall, system_text
from gyre.gateway.openai_chat import json_object, positive_integer
from gyre.gateway.openai_responses_answer import RAW_INPUT, chunks, error_body, error_event, response, summary_of
from gyre.gateway.reading import Reading

__all__ = [
    "API", "PING", "chunks", "error_body", "error_event", "parse_compact", "parse_message", "parse_request", "response",
]  # fmt: skip

API = "openai-responses"
PING = openai_chat.PING

COMPACT_PROMPT = (
    "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary for another LLM that will resume the "
    "task.\n\nInclude:\n- Current progress and key decisions made\n- Important context, constraints, or user "
    "preferences\n- What remains to be done (clear next steps)\n- Any critical data, examples, or references needed to "
    "continue\n\nBe concise, structured, and focused on helping the next LLM seamlessly continue the work.\n"
)
"""What the policy is asked where the caller leaves it to the provider how to compact."""
SUMMARY_PREFIX = "This is a summary of the conversation so far:\n\n"

_SAID = ("reasoning", "function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_TRIGGER = "compaction_trigger"
_COMPACTED = ("compaction", "compaction_summary", "context_compaction")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT = {"input_text": "text", "output_text": "text", "text": "text", "summary_text": "text", "refusal": "refusal"}
_UNSEEN = {"input_image": "image", "input_file": "file", "input_audio": "sound"}
# The id of an item that was emitted here says its call: rs_12_0, msg_12_1 and fc_12_2 are one turn.
_OURS = re.compile(r"^[a-z]+_(\d+)_\d+$")
_NAME = re.compile(r"^[A-Za-z0-9_-]{1,128}$")
# What needs state, or a sampler, that Gyre does not have.
_REFUSED = {
    "previous_response_id": "no response is stored; send the whole history as input",
    "conversation": "no conversation is stored; send the whole history as input",
    "background": "no response is stored that could be fetched later",
    "prompt": "no prompt template is stored; send instructions and input",
    "top_logprobs": "log-probs are not served",
}
# Kept with the call for the record; the run's own sampling parameters are used.
_OPTIONS = (
    "model",
    "temperature",
    "top_p",
    "max_output_tokens",
    "tool_choice",
    "parallel_tool_calls",
    "stream",
    "store",
    "include",
    "reasoning",
    "text",
    "user",
)

Item = dict[str, Any]


def parse_request(body: bytes, model: str, reading: Reading | None = None) -> Request:
    """The body of `POST /v1/responses` in normal form. Raises GatewayError naming the field at fault.

    An input that ends with a `compaction_trigger` asks for a compaction; the answer is one item then.
    """
    data = json_object(body, reading)
    items = data.get("input")
    if isinstance(items, list) and items and isinstance(items[-1], dict) and items[-1].get("type") == _TRIGGER:
        return _request({**data, "input": items[:-1]}, model, reading, compact="item")
    return _request(data, model, reading, compact=None)


def parse_compact(body: bytes, model: str, reading: Reading | None = None) -> Request:
    """The body of `POST /v1/responses/compact`, which asks for a shorter history in place of its input."""
    return _request({**json_object(body), "stream": False}, model, reading, compact="history")


def _request(data: dict[str, Any], model: str, reading: Reading | None, *, compact: str | None) -> Request:
    if data.get("model") != model:
        raise GatewayError("unknown_model", f"The model {data.get('model')!r} does not exist; use {model!r}.", "model")
    for name, why in _REFUSED.items():
        if data.get(name):
            raise GatewayError("bad_request", f"{name} is not supported: {why}.", name)
    include = data.get("include") or []
    if not isinstance(include, list):
        raise GatewayError("bad_request", "include must be a list.", "include")
    if "message.output_text.logprobs" in include:
        raise GatewayError("bad_request", "include: log-probs are not served.", "include")
    if data.get("truncation") == "auto":
        raise GatewayError("bad_request", "truncation must be 'disabled': nothing is left out here.", "truncation")
    tools, custom = _tools(data.get("tools"))
    tool_calls = openai_chat.tool_choice(data.get("tool_choice"), tools)
    pieces = [*_instructions(data.get("instructions")), *_pieces(data.get("input"))]
    messages = (reading or Reading()).messages(
        [piece for piece, _ in pieces], lambda piece, i: [parse_message(piece, pieces[i][1])]
    )
    if not messages:
        raise GatewayError("bad_request", "input must be a text or a list of at least one item.", "input")
    options = {k: data[k] for k in _OPTIONS if k in data}
    if compact is not None:
        messages.append(_item({"role": "user", "content": COMPACT_PROMPT}, "input"))
        options["compact"] = compact
    limit = data.get("max_output_tokens")
    return Request(
        api=API,
        messages=tuple(messages),
        tools=tools,
        parse_tool_calls=bool(tools) and tool_calls and compact is None,
        stop=(),
        max_tokens=None if limit is None else positive_integer(limit, "max_output_tokens"),
        stream=bool(data.get("stream")),
        stream_usage=True,
        options=options,
        custom_tools=custom,
    )


_Piece = tuple[Item, str]
"""What parse_message makes one message of, and where it stood."""


def _instructions(value: Any) -> list[_Piece]:
    if not value:
        return []
    if not isinstance(value, str):
        raise GatewayError("bad_request", "instructions must be a text.", "instructions")
    return [({"instructions": value}, "instructions")]


def _pieces(value: Any) -> list[_Piece]:
    """The items, those of one assistant turn together, in front of the outputs of its calls."""
    if value is None:
        return []
    if isinstance(value, str):
        return [({"role": "user", "content": value}, "input")]
    if not isinstance(value, list):
        raise GatewayError("bad_request", "input must be a text or a list of items.", "input")
    pieces: list[_Piece] = []
    turn: list[Item] = []  # the open assistant turn
    outputs: list[_Piece] = []  # what its calls returned so far
    begun = ""  # where it began

    def close() -> None:
        if turn:
            pieces.append(({"items": list(turn)}, begun))
        pieces.extend(outputs)
        turn.clear()
        outputs.clear()

    for i, item in enumerate(value):
        where = f"input[{i}]"
        if not isinstance(item, dict) or "items" in item or "instructions" in item:
            raise GatewayError("bad_request", f"{where} must be an item of a conversation.", where)
        if _is_said(item):
            if turn and _begins_another(turn, item, bool(outputs)):
                close()
            if not turn:
                begun = where
            turn.append(item)
        elif item.get("type") in _OUTPUTS and turn:
            outputs.append((item, where))
        else:
            close()
            pieces.append((item, where))
    close()
    return pieces


def _begins_another(turn: Sequence[Item], item: Item, returned: bool) -> bool:
    """Whether `item` belongs to another answer than the open turn, some of whose calls may have returned.

    Ids say so where both are from here: a harness may set an output right behind its call, or leave two answers side by
    side. Without them, an output or new reasoning begins another turn.
    """
    ours, theirs = _origin(turn[-1]), _origin(item)
    if ours is not None and theirs is not None:
        return ours != theirs
    return returned or (item.get("type") == "reasoning" and turn[-1].get("type") != "reasoning")


def _is_said(item: Item) -> bool:
    kind = item.get("type", "message")
    return kind in _SAID or (kind == "message" and item.get("role") == "assistant")


def _origin(item: Item) -> str | None:
    """The call that an item was emitted by; None for what is not from here, or came back without its id."""
    found = _OURS.match(str(item.get("id") or ""))
    return None if found is None else found[1]


def parse_message(data: Any, where: str) -> Message:
    """One message in normal form; `where` names it in errors (GatewayError).

    `data` is an item, or {"instructions": text}, or {"items": [...]} for a whole assistant turn.
    """
    if isinstance(data, dict) and isinstance(data.get("instructions"), str):
        return Message("system", system_text(data["instructions"]), raw=data)
    if isinstance(data, dict) and isinstance(data.get("items"), list):
        return _turn(data["items"], where)
    return _item(data, where)


def _item(data: Any, where: str) -> Message:
    """A message of one item."""
    if not isinstance(data, dict):
        raise GatewayError("bad_request", f"{where} must be an item of a conversation.", where)
    kind = data.get("type", "message")
    if kind in _COMPACTED:
        text = summary_of(data.get("encrypted_content"))
        if text is None:
            raise GatewayError(
                "bad_request", f"{where}.encrypted_content is not from here.", f"{where}.encrypted_content"
            )
        return Message("user", SUMMARY_PREFIX + text, raw=data)
    if kind in _OUTPUTS:
        call_id = _text(data, "call_id", where)
        return Message(
            "tool", _content(data.get("output"), f"{where}.output", blind=True), tool_call_id=call_id, raw=data
        )
    if _is_said(data):
        return _turn([data], where)
    if kind != "message":
        raise GatewayError(
            "bad_request",
            f"{where}.type {kind!r} is not supported: the policy has messages, reasoning, function and custom tools.",
            f"{where}.type",
        )
    said = data.get("role")
    role = _ROLES.get(said) if isinstance(said, str) else None
    if role not in ("system", "user"):
        raise GatewayError(
            "bad_request", f"{where}.role must be one of {sorted(_ROLES)}, got {said!r}.", f"{where}.role"
        )
    content = _content(data.get("content"), f"{where}.content")
    if role == "system":
        return Message("system", system_text(content), raw=data)
    return Message("user", content, raw=data)


def _turn(items: list[Item], where: str) -> Message:
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            # The whole text where it is shown, else its summary; nothing where only encrypted_content came back.
            parts = item.get("content") or item.get("summary") or []
            reasoning.append(_content(_typed(parts, "reasoning_text", "text"), f"{where}.content"))
        elif kind == "message":
            content.append(_content(item.get("content"), f"{where}.content"))
        else:
            calls.append(_call(item, where))
    thought = "\n\n".join(t for t in reasoning if t)
    return Message("assistant", "".join(content), thought or None, tuple(calls), raw={"items": items})


def _typed(parts: Any, kind: str, alias: str) -> Any:
    """The parts with one more type of text part in them."""
    if not isinstance(parts, list):
        return parts
    return [{**p, "type": alias} if isinstance(p, dict) and p.get("type") == kind else p for p in parts]


def _call(item: Item, where: str) -> ToolCall:
    name = _text(item, "name", where)
    if item.get("namespace"):
        name = f"{_text(item, 'namespace', where)}.{name}"
    call_id = _text(item, "call_id", where)
    if item["type"] == "function_call":
        return ToolCall(call_id, name, _text(item, "arguments", where))
    text = _text(item, "input", where)
    if str(item.get("id", "")).startswith(RAW_INPUT):  # arguments that were no {"input": text}, as they were sampled
        return ToolCall(call_id, name, text)
    return ToolCall(call_id, name, orjson.dumps({"input": text}).decode())


def _text(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise GatewayError("bad_request", f"{where}.{name} must be a text.", f"{where}.{name}")
    return value


def _content(value: Any, where: str, *, blind: bool = False) -> str:
    """The text of a content; `blind`: what the policy cannot see is named in its place (tools may return images)."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if not isinstance(value, list):
        raise GatewayError("bad_request", f"{where} must be a text or a list of parts.", where)
    texts: list[str] = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        text = None
        if isinstance(part, dict) and isinstance(kind, str):
            text = part.get(_TEXT.get(kind, ""))
            if blind and kind in _UNSEEN:
                text = openai_chat.unseen(_UNSEEN[kind])
        if not isinstance(text, str):
            raise GatewayError(
                "bad_request", f"{where}[{i}] must be a text part: the policy reads text only.", f"{where}[{i}]"
            )
        texts.append(text)
    return "".join(texts)


def _tools(value: Any) -> tuple[tuple[dict[str, Any], ...], frozenset[str]]:
    """Function objects as Chat has them, and which of them are custom tools.

    A namespace's tools get its name in front. Tools that OpenAI itself would run (web_search, local_shell, tool_search
    and so on) are left out: the policy is not told of them and cannot call them.
    """
    if value is None:
        return (), frozenset()
    if not isinstance(value, list):
        raise GatewayError("bad_request", "tools must be a list.", "tools")
    functions: list[dict[str, Any]] = []
    custom: set[str] = set()

    def add(tools: Sequence[Any], where: str, namespace: str) -> None:
        for i, tool in enumerate(tools):
            at = f"{where}[{i}]"
            if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
                raise GatewayError("bad_request", f"{at} must be an object with a type.", at)
            if tool["type"] not in ("function", "custom", "namespace"):
                continue
            name = tool.get("name")
            if not isinstance(name, str) or not _NAME.match(name):
                raise GatewayError("bad_request", f"{at}.name must be letters, digits, _ and -.", f"{at}.name")
            if tool["type"] == "namespace":
                inner = tool.get("tools")
                if namespace or not isinstance(inner, list):
                    raise GatewayError("bad_request", f"{at}.tools must be a list of tools.", f"{at}.tools")
                add(inner, f"{at}.tools", f"{name}.")
                continue
            if tool["type"] == "custom":
                custom.add(namespace + name)
            function = {"name": namespace + name, "description": tool.get("description") or ""}
            parameters = _free_text(tool) if tool["type"] == "custom" else tool.get("parameters")
            functions.append({"type": "function", "function": {**function, "parameters": parameters or _NOTHING}})

    add(value, "tools", "")
    return tuple(functions), frozenset(custom)


_NOTHING = {"type": "object", "properties": {}}


def _free_text(tool: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a custom tool: one text, whose grammar the policy reads in its description."""
    form = tool.get("format")
    says = "Free text."
    if isinstance(form, dict) and form.get("type") == "grammar":
        says = f"Text of this grammar ({form.get('syntax')}):\n{form.get('definition')}"
    schema = {"type": "string", "description": says}
    return {"type": "object", "properties": {"input": schema}, "required": ["input"]}
