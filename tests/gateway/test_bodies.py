"""Parsing only what is new gives what parsing the whole gives, value for value and error for error."""

from __future__ import annotations

import json
import random
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gyre.gateway import bodies
from gyre.gateway.bodies import Bodies

TEXT = st.text(st.sampled_from('ab"\\{}[]:,é\U0001f600\n '), max_size=8)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
MESSAGE = st.dictionaries(st.sampled_from(["role", "content", "messages", "input"]), VALUE, max_size=3)
WRITERS = [
    lambda value: orjson.dumps(value),
    lambda value: json.dumps(value).encode(),
    lambda value: json.dumps(value, indent=1, ensure_ascii=False).encode(),
]


def both(known: Bodies, body: bytes) -> None:
    try:
        whole = orjson.loads(body)
    except orjson.JSONDecodeError:
        with pytest.raises(orjson.JSONDecodeError):
            known.load(body)
        return
    assert known.load(body) == whole
    assert json.dumps(known.load(body)) == json.dumps(whole), "True is not 1, and keys stay in order"


@given(
    st.dictionaries(TEXT, VALUE, max_size=2), st.dictionaries(TEXT, VALUE, max_size=2),
    st.lists(MESSAGE, min_size=1, max_size=4), st.sampled_from(["messages", "input", "other"]),
    st.lists(st.tuples(st.integers(0, 5), MESSAGE, st.integers(0, 2)), max_size=8), st.sampled_from(WRITERS),
    st.integers(0, 2**32),
)  # fmt: skip
def test_bodies_that_grow(
    before: dict[str, Any], after: dict[str, Any], start: list[Any], key: str,
    steps: list[tuple[int, Any, int]], write: Any, seed: int,
) -> None:  # fmt: skip
    known, rng, messages = Bodies(), random.Random(seed), list(start)
    for what, message, at in steps:
        if what <= 2:
            messages = [*messages, message, {"role": "user"}]
        elif what == 3:
            messages = [*messages[:at], message, *messages[at + 1 :]]
        elif what == 4:
            messages = messages[: at + 1]
        else:
            after = {**after, "more": at}
        body = write({**before, key: messages, **after})
        both(known, body)
        # Any other byte, missing byte or byte too many: the same value, or the same refusal.
        place = rng.randrange(len(body))
        both(
            known,
            body[:place] + rng.choice([b"", b"x", b"]", b"}", b'"', b",", b"[{}]"]) + body[place + rng.randrange(2) :],
        )


@example([b'{"messages":[{"a":1}]}', b'{"messages":[{"a":1},{"b":2}],"":[{}]}'])
@example([b'{"messages":[{"a":1}],"x":[1]}', b'{"messages":[{"a":1}],"messages":[{"b":2}],"x":[1]}'])
@example(
    [b'{"messages":[{"a":1}],"mess\\u0061ges":[{"b":2}]}', b'{"messages":[{"a":1},{}],"mess\\u0061ges":[{"b":2}]}']
)
@example([b'{"messages":[{"a":1},2]}', b'{"messages":[{"a":1},23]}'])
@example([b'{"messages":[{"a":1}]}', b'{"messages":[{"a":1} {"b":2}]}'])
@example([b'{"messages":[{"a":1}]}', b'{"messages":[{"a":1},]}'])
@example([b'{"messages":[{"a":1}]}', b'{"messages":[]}'])
@example([b'{"m":{"messages":[{"a":1}]}}', b'{"m":{"messages":[{"a":1},{"a":2}]}}'])
@example([b'{"messages":[{"a":1}]}', b'{"messages":[{"a":1}],"":[{"b":2}]}'])
@given(st.lists(st.sampled_from([b'{"messages":[{"a":1}]}', b'{"messages":[{"a":1},{"b":2}]}', b"[]", b"{}"])))
def test_bodies_made_to_mislead(texts: list[bytes]) -> None:
    known = Bodies()
    for text in texts:
        both(known, text)


def test_only_what_is_new_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A harness that moves its cache mark, and a sub-agent beside it: each call parses its own few new messages."""
    seen: list[int] = []
    loads = orjson.loads

    def counted(text: bytes) -> Any:
        seen.append(len(text))
        return loads(text)

    known = Bodies()
    agents = {
        name: [{"role": "user", "content": [{"type": "text", "text": f"{name} {i} " * 50}]} for i in range(40)]
        for name in ("main", "sub")
    }
    tools = [{"name": "bash", "description": "x" * 5000}]
    for turn in range(6):
        for messages in agents.values():
            marked = [*messages[:-1], {**messages[-1], "cache_control": {"type": "ephemeral"}}]
            body = orjson.dumps({"model": "m", "messages": marked, "tools": tools, "stream": True})
            with monkeypatch.context() as patch:
                patch.setattr(bodies.orjson, "loads", counted)
                data = known.load(body)
            assert data == loads(body)
            messages += [{"role": "assistant", "content": f"{turn}"}, {"role": "user", "content": "more"}]
    assert min(seen[:2]) > 10_000
    assert max(seen[2:]) < 2000


def test_long_bodies_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "KEPT_BYTES", 1000)
    known = Bodies()
    for name in "abcd":
        known.load(orjson.dumps({"messages": [{"role": name * 300}]}))
        assert sum(len(k.text) for k in known._known) <= 1000
    known.load(orjson.dumps({"messages": [{"role": "e" * 3000}]}))
    assert len(known._known) == 1


def test_a_harness_whose_bodies_never_repeat_is_not_looked_through_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    known, looked = Bodies(), []
    scan = bodies._scan

    def counted(text: bytes, data: dict[str, Any]) -> Any:
        looked.append(text)
        return scan(text, data)

    monkeypatch.setattr(bodies, "_scan", counted)
    for i in range(50):
        known.load(orjson.dumps({"messages": [{"a": i}], "at": i}))
    assert len(looked) == bodies.PATIENCE + 1
