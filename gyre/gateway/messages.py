"""What every wire format becomes: one list of messages, and tools. Also: when two messages mean the same.

Harnesses echo a reply differently from how it was sent (re-serialised arguments, trimmed text, dropped reasoning), so
sameness is by value. What is never compared: ids of tool calls, the harness's billing header, unknown extra keys.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

Role = Literal["system", "user", "assistant", "tool"]

DEEPEST = 100
"""Levels of nesting in JSON that are read as such; orjson writes 254 at most, and Python's recursion ends, too."""
# A line that Claude Code puts into its system text; it changes with every task, sub-agent and compaction.
BILLING_HEADER = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an assistant message; `arguments` is the text on the wire, JSON or not."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """A message, free of its provider. `raw` is what the harness sent, for the record; it is never compared."""

    role: Role
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    raw: Any = field(default=None, compare=False, repr=False)

    def rendered(self) -> dict[str, Any]:
        """The message as `renderers` takes it."""
        out: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            out["reasoning_content"] = self.reasoning
        if self.tool_calls:
            out["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": argument_value(call.arguments)},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            out["name"] = self.name
        return out


@dataclass(frozen=True, slots=True)
class Request:
    """A call in normal form. `tools` are OpenAI tool objects in the harness's order; `options` is for the record."""

    api: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    parse_tool_calls: bool
    stop: tuple[str, ...]
    max_tokens: int | None
    stream: bool
    stream_usage: bool
    options: dict[str, Any]
    custom_tools: frozenset[str] = frozenset()
    """Tools that take free text on the wire; here they are functions with one string argument `input`."""

    @property
    def tools_key(self) -> str:
        """Identity of the tools: a hash that is equal for tools that are equal as values; "" for none."""
        if not self.tools:
            return ""
        return hashlib.sha256(orjson.dumps(self.tools, option=orjson.OPT_SORT_KEYS)).hexdigest()


def too_deep(value: Any, levels: int = DEEPEST) -> bool:
    """Whether a JSON value is nested more than `levels` deep: beyond, serialisers and templates fail."""
    level = [value]
    for _ in range(levels + 1):
        nested = [v for v in level if isinstance(v, (dict, list, tuple))]
        if not nested:
            return False
        level = [inner for v in nested for inner in (v.values() if isinstance(v, dict) else v)]
    return True


def argument_value(text: str) -> Any:
    """The value of a tool call's arguments: parsed JSON with whole floats as integers, or the text where it is none.

    What is nested without end counts as text.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if text.count("{") + text.count("[") > DEEPEST and too_deep(value) else _canonical(value)


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {k: _canonical(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_canonical(v) for v in value]
    return value


def difference(emitted: Message, echoed: Message) -> str | None:
    """Why `echoed` is not the assistant message `emitted`; None where it is.

    Same text but for outer whitespace; the same calls by name and value; reasoning may be missing, not changed. Where
    the ids of a call are equal too, the harness may have added arguments (injected defaults) or trimmed strings.
    """
    if len(emitted.tool_calls) != len(echoed.tool_calls):
        return "tool_calls_edited"
    for ours, theirs in zip(emitted.tool_calls, echoed.tool_calls, strict=True):
        if ours.name != theirs.name:
            return "tool_calls_edited"
        if ours.arguments != theirs.arguments and not _same_arguments(ours, theirs):
            return "arguments_edited"
    if emitted.content != echoed.content and emitted.content.strip() != echoed.content.strip():
        return "content_edited"
    if echoed.reasoning and echoed.reasoning.strip() != (emitted.reasoning or "").strip():
        return "reasoning_edited"
    return None


def _same_arguments(ours: ToolCall, theirs: ToolCall) -> bool:
    a, b = argument_value(ours.arguments), argument_value(theirs.arguments)
    if _equal(a, b):
        return True
    if ours.id != theirs.id or not (isinstance(a, dict) and isinstance(b, dict)):
        return False
    return all(key in b and _equal(_trimmed(value), _trimmed(b[key])) for key, value in a.items())


def _equal(a: Any, b: Any) -> bool:
    # Python holds True == 1; JSON does not.
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(v, b[k]) for k, v in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _trimmed(value: Any) -> Any:
    return value.rstrip() if isinstance(value, str) else value


def same(a: Message, b: Message) -> bool:
    """Whether two messages of a history mean the same. Ids of tool calls do not count."""
    if a.role != b.role:
        return False
    if a.role == "assistant":
        return difference(a, b) is None
    return a.content == b.content


def system_text(text: str) -> str:
    """A system text without the billing header."""
    return BILLING_HEADER.sub("", text) if "x-anthropic-billing-header" in text.lower() else text
