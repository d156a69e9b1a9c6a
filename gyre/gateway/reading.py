"""Requests repeat what was sent before: messages that came already are not made into normal form again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gyre.gateway.bodies import Bodies
from gyre.gateway.messages import Message

HISTORIES = 8
"""Conversations of one rollout that are remembered: a main one, and sub-agents beside it."""

_Read = tuple[Any, tuple[Message, ...]]


class Reading:
    """The newest request of each conversation of a rollout: its messages as they came, and in normal form.

    What is equal as JSON gives the very same objects again, so that nothing after it need compare them either.
    """

    def __init__(self) -> None:
        self._bodies = Bodies()
        self._known: deque[list[_Read]] = deque(maxlen=HISTORIES)

    def load(self, body: bytes) -> Any:
        """The JSON of a body. Raises orjson.JSONDecodeError. Nobody may change what it gives: it is shared."""
        return self._bodies.load(body)

    def messages(self, given: Sequence[Any], parse: Callable[[Any, int], Sequence[Message]]) -> list[Message]:
        """The messages of a request in normal form; `parse(message, position)` is asked for those that are new."""
        old: list[_Read] = []
        same = 0
        for known in self._known:
            if (n := _equal(known, given)) > same:
                old, same = known, n
        read = old[:same]
        read += [(raw, tuple(parse(raw, i))) for i, raw in enumerate(given[len(read) :], len(read))]
        if old and same == len(old):
            self._known = deque((k for k in self._known if k is not old), maxlen=HISTORIES)
        self._known.append(read)
        return [message for _, messages in read for message in messages]


def _equal(known: list[_Read], given: Sequence[Any]) -> int:
    n = 0
    for (raw, _), new in zip(known, given, strict=False):
        if raw is not new and raw != new:
            break
        n += 1
    return n
