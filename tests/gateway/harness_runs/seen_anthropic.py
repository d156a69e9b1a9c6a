"""Anthropic Messages as a harness wrote and read it."""

from __future__ import annotations

import json
from typing import Any

from tests.gateway.harness_runs.seen import READERS, Item, Reply, Seen, canonical, sse


def request(body: bytes) -> Seen:
    """Items of a request body."""
    data = json.loads(body)
    items: list[Item] = []
    system = _text(data.get("system") or "")
    if system:
        items.append(Item("system", system))
    for message in data["messages"]:
        role, content = message["role"], message["content"]
        if role == "assistant":
            items.append(_assistant(content))
        elif isinstance(content, str) or role == "system":
            items.append(Item(role, _text(content)))
        else:
            run: list[Any] = []
            for block in [*content, None]:
                if block is not None and block["type"] != "tool_result":
                    run.append(block)
                    continue
                if run:
                    items.append(Item("user", _text(run)))
                    run = []
                if block is not None:
                    error = "Error:\n" if block.get("is_error") else ""
                    items.append(Item("tool", error + _text(block.get("content") or "")))
    return Seen(items, [tool["name"] for tool in data.get("tools") or []])


def answer(body: bytes) -> Reply:
    """The answer, streamed or not."""
    if not body.startswith(b"{"):
        message: dict[str, Any] = {}
        for event in sse(body):
            match event["type"]:
                case "message_start":
                    message = event["message"]
                case "content_block_start":
                    message["content"].append(event["content_block"])
                case "content_block_delta":
                    _add(message["content"][event["index"]], event["delta"])
                case "message_delta":
                    message |= event["delta"] | {"usage": event["usage"]}
                case "message_stop":
                    message["stopped"] = True
        assert message.pop("stopped"), "the stream has no message_stop"
        for block in message["content"]:
            if block["type"] == "tool_use" and isinstance(block["input"], str):
                block["input"] = json.loads(block["input"])
    else:
        message = json.loads(body)
    usage = message["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    return Reply(_assistant(message["content"]), message["stop_reason"], prompt, usage["output_tokens"])


def _add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] += delta["signature"]
        case "input_json_delta":
            block["input"] = (block["input"] or "") + delta["partial_json"]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block["text"] for block in content if block["text"])


def _assistant(content: Any) -> Item:
    if isinstance(content, str):
        return Item("assistant", content.strip())
    texts = [b["text"] for b in content if b["type"] == "text"]
    thoughts = [b["thinking"] for b in content if b["type"] == "thinking"]
    calls = [(b["name"], _arguments(b["input"])) for b in content if b["type"] == "tool_use"]
    return Item("assistant", "\n".join(texts).strip(), "\n".join(thoughts).strip(), tuple(calls))


def _arguments(value: dict[str, Any]) -> str:
    # What the API has no form for: arguments that are no object.
    return canonical(value["_raw_arguments"] if value.keys() == {"_raw_arguments"} else value)


READERS["/v1/messages"] = (request, answer)
