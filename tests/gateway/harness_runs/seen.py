"""What a harness saw, as plain items, and the same of decoded token ids. None of Gyre's own parsing is used."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer


@dataclass(frozen=True)
class Item:
    """A message. `calls` are (name, arguments as a value); `reasoning` and `calls` are of the assistant alone."""

    role: str
    text: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Seen:
    """A request as its harness wrote it: messages, and the names of its tools."""

    items: list[Item]
    tools: list[str]


@dataclass(frozen=True)
class Reply:
    """An answer as its harness read it. `prompt_tokens` and `output_tokens` are what it was told."""

    item: Item
    stop: str
    prompt_tokens: int
    output_tokens: int


def canonical(value: Any) -> str:
    """A JSON value as text that is equal for equal values (1.0 and 1 are)."""
    return json.dumps(_whole(value), sort_keys=True, ensure_ascii=False)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {k: _whole(v) for k, v in value.items()}
    return [_whole(v) for v in value] if isinstance(value, list) else value


READERS: dict[str, tuple[Callable[[bytes], Seen], Callable[[bytes], Reply]]] = {}
"""By the end of a path: how a request and an answer of that API are read (each `seen_*.py` adds its own)."""


def sse(answer: bytes) -> list[dict[str, Any]]:
    """The JSON data of server-sent events, pings and comments left out."""
    out = []
    for event in answer.decode().split("\n\n"):
        data = "\n".join(line[6:] for line in event.splitlines() if line.startswith("data: "))
        if data and data != "[DONE]" and (value := json.loads(data)).get("type") != "ping":
            out.append(value)
    return out


_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n|<\|im_end\|>$|$)", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_THOUGHT = re.compile(r"^<think>\n(.*?)\n</think>\n\n", re.DOTALL)
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
TOOLS = "# Tools\n\nYou may call one or more functions"


def decoded(ids: Sequence[int], tokenizer: Tokenizer) -> Seen:
    """Token ids of a Qwen3 prompt or branch as items, by its template alone."""
    text = tokenizer.decode(list(ids), skip_special_tokens=False)
    items: list[Item] = []
    tools: list[str] = []
    for i, (role, said) in enumerate(_TURN.findall(text)):
        if i == 0 and role == "system" and TOOLS in said:
            said, _, offered = said.partition(TOOLS)
            said = said.removesuffix("\n\n")
            block = offered.partition("\n<tools>")[2].partition("\n</tools>")[0]
            tools = [json.loads(line)["function"]["name"] for line in block.splitlines() if line]
            if not said:
                continue
        if role == "assistant":
            items.append(assistant(said))
        elif role == "user" and said.startswith("<tool_response>\n"):
            items += [Item("tool", inner) for inner in _RESPONSE.findall(said)]
        else:
            items.append(Item(role, said))
    return Seen(items, tools)


def assistant(said: str) -> Item:
    """An assistant turn of the Qwen3 template. Tool calls that are not JSON stay in the text."""
    reasoning = ""
    if found := _THOUGHT.match(said):
        reasoning, said = found[1], said[found.end() :]
    calls: list[tuple[str, str]] = []

    def take(match: re.Match[str]) -> str:
        try:
            body = json.loads(match[1])
            calls.append((body["name"], canonical(body["arguments"])))
        except (ValueError, KeyError, TypeError):
            return match[0]
        return ""

    text = _CALL.sub(take, said)
    return Item("assistant", text.strip(), reasoning.strip(), tuple(calls))
