"""OpenAI Chat Completions and Responses as a harness wrote and read them."""

from __future__ import annotations

import json
from typing import Any

from tests.gateway.harness_runs.seen import READERS, Item, Reply, Seen, canonical, sse

ROLES = {"system": "system", "developer": "system", "user": "user", "tool": "tool"}


def chat_request(body: bytes) -> Seen:
    """Items of a Chat request."""
    data = json.loads(body)
    items = [_chat_message(m) for m in data["messages"]]
    return Seen(items, [tool["function"]["name"] for tool in data.get("tools") or []])


def chat_answer(body: bytes) -> Reply:
    """A Chat answer, streamed or not."""
    if body.startswith(b"{"):
        data = json.loads(body)
        [choice] = data["choices"]
        message, stop, usage = choice["message"], choice["finish_reason"], data["usage"]
    else:
        assert body.endswith(b"data: [DONE]\n\n"), "the stream has no end"
        message, stop, usage = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}, "", {}
        for event in sse(body):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                stop = choice["finish_reason"] or stop
                delta = choice["delta"]
                for field in ("content", "reasoning_content"):
                    message[field] += delta.get(field) or ""
                for call in delta.get("tool_calls", []):
                    assert call["index"] == len(message["tool_calls"]), "each call is whole in its event"
                    message["tool_calls"].append(call)
    return Reply(_chat_message(message), stop, usage["prompt_tokens"], usage["completion_tokens"])


def _chat_message(message: dict[str, Any]) -> Item:
    if message["role"] != "assistant":
        return Item(ROLES[message["role"]], _text(message["content"]))
    calls = [_call(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    thought = message.get("reasoning_content") or ""
    return Item("assistant", _text(message.get("content")).strip(), thought.strip(), tuple(calls))


def responses_request(body: bytes) -> Seen:
    """Items of a Responses request: what an assistant said between two other items is one of them."""
    data = json.loads(body)
    items = [Item("system", data["instructions"])] if data.get("instructions") else []
    turn: list[dict[str, Any]] = []
    for item in [*data["input"], None]:
        if item is not None and _is_said(item):
            turn.append(item)
            continue
        if turn:
            items.append(_said(turn))
            turn = []
        if item is None:
            break
        if item.get("type", "message").endswith("_output"):
            items.append(Item("tool", _text(item["output"])))
        else:
            items.append(Item(ROLES[item["role"]], _text(item["content"])))
    tools: list[str] = []
    for tool in data.get("tools") or []:
        inner = tool.get("tools") if tool["type"] == "namespace" else None
        tools += [f"{tool['name']}.{t['name']}" for t in inner] if inner else [tool["name"]]
    return Seen(items, tools)


def responses_answer(body: bytes) -> Reply:
    """A Responses answer; of a stream, from the items that were done one by one."""
    if body.startswith(b"{"):
        final = json.loads(body)
    else:
        events = sse(body)
        assert events[-1]["type"] in ("response.completed", "response.incomplete"), "the stream has no end"
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        final = events[-1]["response"]
        assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == final["output"]
    usage = final["usage"]
    return Reply(_said(final["output"]), final["status"], usage["input_tokens"], usage["output_tokens"])


def _is_said(item: dict[str, Any]) -> bool:
    said = ("reasoning", "function_call", "custom_tool_call")
    return item.get("type") in said or item.get("role") == "assistant"


def _said(items: list[dict[str, Any]]) -> Item:
    thoughts, texts, calls = [], [], []
    for item in items:
        match item["type"]:
            case "reasoning":
                thoughts.append(_text(item["summary"]))
            case "message":
                texts.append(_text(item["content"]))
            case kind:
                name = f"{item['namespace']}.{item['name']}" if item.get("namespace") else item["name"]
                given = item["arguments"] if kind == "function_call" else json.dumps({"input": item["input"]})
                calls.append(_call(name, given))
    return Item("assistant", "".join(texts).strip(), "".join(thoughts).strip(), tuple(calls))


def _call(name: str, arguments: str) -> tuple[str, str]:
    return name, canonical(json.loads(arguments))


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] for part in content)


READERS["/v1/chat/completions"] = (chat_request, chat_answer)
READERS["/v1/responses"] = (responses_request, responses_answer)
