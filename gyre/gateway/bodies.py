"""JSON bodies that repeat an earlier one up to a point: only what is new is parsed.

A harness sends its whole history with every call. A body that begins like one before, up to the end of some message,
and ends like it, from the end of its messages on, differs by whole messages only:

    {"model": …, "messages": [ A, B, C ], "tools": …}
    {"model": …, "messages": [ A, B, D, E ], "tools": …}

Up to the end of B a parser would be in the same state, and again from the `]` on; so `[D, E]` is all there is to parse,
and the values of A and B are the very objects of the time before.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

KEPT = 4
"""Bodies of one rollout that are remembered: the main conversation's, and sub-agents' beside it."""
KEPT_BYTES = 6_000_000
"""Their size, all together; the newest is kept whatever its size."""
LISTS = (b'"messages"', b'"input"')
"""Top-level keys whose lists grow from call to call."""
PATIENCE = 4
"""Bodies in a row that could have repeated an earlier one and did not, after which none is looked through any more."""

# Strings are skipped whole; what stays are the marks that structure is made of.
_MARKS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_COMMA = re.compile(rb"[ \t\r\n]*,")


@dataclass(frozen=True, slots=True, eq=False)
class _Body:
    text: bytes
    data: dict[str, Any]
    key: str
    first: int
    """Offset just after the list's `[`."""
    ends: list[int]
    """Offsets just after its objects."""
    close: int
    """Offset of its `]`."""


class Bodies:
    """The newest bodies of one rollout."""

    def __init__(self) -> None:
        self._known: deque[_Body] = deque(maxlen=KEPT)
        self._in_vain = 0

    def load(self, text: bytes) -> Any:
        """What `orjson.loads` gives, sharing values with what it gave before. Raises orjson.JSONDecodeError.

        Nobody may change the values.
        """
        for known in reversed(self._known):
            if (grown := _grown(known, text)) is not None:
                if known.ends == grown.ends[: len(known.ends)]:
                    self._known.remove(known)
                self._keep(grown)
                self._in_vain = 0
                return grown.data
        data = orjson.loads(text)
        if isinstance(data, dict) and self._in_vain < PATIENCE:
            self._in_vain += bool(self._known)
            if (body := _scan(text, data)) is not None:
                self._keep(body)
        return data

    def _keep(self, body: _Body) -> None:
        self._known.append(body)
        while len(self._known) > 1 and sum(len(k.text) for k in self._known) > KEPT_BYTES:
            self._known.popleft()


def _grown(known: _Body, text: bytes) -> _Body | None:
    """`text` as the known body with other objects after some of its own; None where it is not."""
    ending = known.text[known.close :]
    if text[: known.first] != known.text[: known.first] or not text.endswith(ending):
        return None
    close = len(text) - len(ending)
    kept = bisect_right(known.ends, min(_same(known.text, text), close))
    if kept == 0:
        return None
    at = known.ends[kept - 1]
    new: list[Any] = []
    ends = known.ends[:kept]
    if text[at:close].strip(b" \t\r\n"):
        comma = _COMMA.match(text, at, close)
        if comma is None:
            return None
        try:  # as deep as it is in the whole, for the parser's limit of depth
            new = orjson.loads(b'{"":[%b]}' % text[comma.end() : close])[""]
        except (orjson.JSONDecodeError, KeyError):
            return None  # the whole is parsed, and says what is wrong
        found = _objects(text, comma.end(), close)
        if not new or found is None or len(found) != len(new):
            return None
        ends += found
    data = {**known.data, known.key: known.data[known.key][:kept] + new}
    return _Body(text, data, known.key, known.first, ends, close)


def _same(a: bytes, b: bytes) -> int:
    """How many bytes two texts have in common at their beginning."""
    x, y = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
    n = min(len(x), len(y))
    step = 1 << 16
    for at in range(0, n, step):
        different = x[at : min(at + step, n)] != y[at : min(at + step, n)]
        if different.any():
            return at + int(different.argmax())
    return n


def _objects(text: bytes, start: int, end: int) -> list[int] | None:
    """Offsets just after each object of a list's inside; None where it holds anything else, or another list's end."""
    ends: list[int] = []
    depth = 0
    for mark in _MARKS.finditer(text, start, end):
        what = text[mark.start()]
        if what in b"{[":
            if depth == 0 and what != ord("{"):
                return None
            depth += 1
        elif what in b"}]":
            depth -= 1
            if depth < 0:
                return None
            if depth == 0:
                ends.append(mark.end())
        elif depth == 0:
            return None
    return ends if depth == 0 else None


def _scan(text: bytes, data: dict[str, Any]) -> _Body | None:
    """Where the growing list of a valid body is; None where it has none, or one that cannot be told for certain."""
    depth = 0
    found: tuple[str, int, int] | None = None
    key: bytes | None = None
    first = 0
    for mark in _MARKS.finditer(text):
        what = text[mark.start()]
        if what in b"{[":
            depth += 1
            if depth == 2 and what == ord("[") and key is not None:
                first = mark.end()
        elif what in b"}]":
            depth -= 1
            if depth == 1 and first and key is not None:
                found = (key[1:-1].decode(), first, mark.start())
                key, first = None, 0
        elif depth == 1:
            colon = _COLON.match(text, mark.end())
            if colon is None:
                continue  # a value
            if b"\\" in mark[0] or (found is not None and mark[0][1:-1].decode("utf-8", "replace") == found[0]):
                return None  # a key in disguise, or one that comes twice
            grows = mark[0] in LISTS and text[colon.end() : colon.end() + 1] == b"["
            key, first = (mark[0], 0) if grows and found is None else (None, 0)
    if found is None:
        return None
    name, first, close = found
    ends = _objects(text, first, close)
    if not ends or len(ends) != len(data[name]):
        return None
    return _Body(text, data, name, first, ends, close)
