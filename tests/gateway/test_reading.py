"""What came before is not read again, and what is read is what a fresh reading gives."""

from __future__ import annotations

import json
import random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.gateway import anthropic_messages, openai_chat
from gyre.gateway.reading import HISTORIES, Reading

WORDS = st.sampled_from(["a", "b", "ls", ""])


def openai_body(said: list[tuple[str, str]]) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": role, "content": text} for role, text in said]})


def anthropic_body(said: list[tuple[str, str]]) -> bytes:
    messages: list[Any] = []
    for i, (role, text) in enumerate(said):
        block = {"type": "text", "text": text or "."}
        if i == len(said) - 1:
            block["cache_control"] = {"type": "ephemeral"}  # type: ignore[assignment]
        messages.append({"role": role, "content": [block]})
    return orjson.dumps({"model": "m", "max_tokens": 9, "messages": messages})


@pytest.mark.parametrize("wire", ["openai", "anthropic"])
@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), WORDS), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), WORDS), max_size=12),
    st.integers(0, 2**32),
)
def test_what_is_remembered_changes_nothing(
    wire: str, start: list[tuple[str, str]], steps: list[tuple[int, int, str]], seed: int
) -> None:
    body, parse = {
        "openai": (openai_body, openai_chat.parse_request),
        "anthropic": (anthropic_body, anthropic_messages.parse_request),
    }[wire]
    reading, histories = Reading(), [list(start)]
    rng = random.Random(seed)
    for what, at, text in steps:
        history = list(rng.choice(histories))
        if what == 0:
            history += [("assistant", text), ("user", "go on")]
        elif what == 1:
            history[at % len(history)] = ("user", text)
        elif what == 2:
            history = [*history[: at + 1], ("user", text)]
        histories.append(history)
        assert parse(body(history), "m", reading) == parse(body(history), "m")


def test_what_came_before_is_the_same_object() -> None:
    reading = Reading()
    history = [("user", f"message {i}") for i in range(50)]
    first = openai_chat.parse_request(openai_body(history), "m", reading)
    second = openai_chat.parse_request(openai_body([*history, ("user", "new")]), "m", reading)
    assert all(a is b for a, b in zip(first.messages, second.messages, strict=False))
    # Sub-agents beside it do not make it forget.
    for i in range(HISTORIES - 1):
        openai_chat.parse_request(openai_body([("user", f"agent {i}")]), "m", reading)
    third = openai_chat.parse_request(openai_body([*history, ("user", "new"), ("user", "x")]), "m", reading)
    assert all(a is b for a, b in zip(second.messages, third.messages, strict=False))


def test_values_that_python_holds_equal_are_told_apart() -> None:
    reading = Reading()
    for value in (1, True, 1.0, [0, {"b": False}], [False, {"b": 0}]):
        call = {"id": "c", "function": {"name": "f", "arguments": {"x": value}}}
        body = {"model": "m", "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
        read = openai_chat.parse_request(orjson.dumps(body), "m", reading)
        assert read.messages[0].tool_calls[0].arguments == orjson.dumps({"x": value}).decode()


def test_a_message_that_is_nested_without_end_is_refused() -> None:
    deep: Any = {}
    for _ in range(300):
        deep = {"a": deep}
    call = {"id": "c", "function": {"name": "f", "arguments": deep}}
    body = {"model": "m", "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
    with pytest.raises(openai_chat.GatewayError, match="nested more than"):
        openai_chat.parse_request(json.dumps(body).encode(), "m", Reading())


def test_a_bad_message_is_named_and_nothing_is_remembered_of_it() -> None:
    reading = Reading()
    good = [("user", "a"), ("user", "b")]
    openai_chat.parse_request(openai_body(good), "m", reading)
    with pytest.raises(openai_chat.GatewayError, match=r"messages\[2\]\.role"):
        openai_chat.parse_request(openai_body([*good, ("robot", "x")]), "m", reading)
    assert len(openai_chat.parse_request(openai_body(good), "m", reading).messages) == 2
