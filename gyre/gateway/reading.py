"""Requests repeat what was sent before: messages that came already are not made into normal form again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from gyre.gateway.bodies import Bodies
from gyre.gateway.errors import GatewayError
from gyre.gateway.messages import DEEPEST, Message, too_deep

# A message holds the arguments of calls, a few levels down.
DEEPEST_MESSAGE = 2 * DEEPEST
HISTORIES = 8
"""Conversations of one rollout that are remembered: a main one, and sub-agents beside it."""


@dataclass(frozen=True, slots=True, eq=False)
class _History:
    raws: list[Any]
    messages: list[Message]
    ends: list[int]
    """How many of `messages` the raws up to each one are."""

    def same(self, given: Sequence[Any]) -> int:
        """How many of its raws `given` begins with."""
        pairs = zip(count(), self.raws, given, strict=False)
        at = next((i for i, old, new in pairs if old is not new and (old != new or _kinds(old) != _kinds(new))), None)
        return min(len(self.raws), len(given)) if at is None else at


def _kinds(value: Any) -> list[type]:
    """The types of the numbers and truth values of a JSON value, in order of keys: Python holds True == 1 == 1.0."""
    if isinstance(value, dict):
        return [kind for key in sorted(value) for kind in _kinds(value[key])]
    if isinstance(value, list):
        return [kind for inner in value for kind in _kinds(inner)]
    return [] if isinstance(value, str) else [type(value)]


class Reading:
    """The newest request of each conversation of a rollout: its messages as they came, and in normal form.

    What is equal as JSON gives the very same objects again, so that nothing after it need compare them either.
    """

    def __init__(self) -> None:
        self._bodies = Bodies()
        self._known: deque[_History] = deque(maxlen=HISTORIES)

    def load(self, body: bytes) -> Any:
        """The JSON of a body. Raises orjson.JSONDecodeError. Nobody may change what it gives: it is shared."""
        return self._bodies.load(body)

    def messages(self, given: Sequence[Any], parse: Callable[[Any, int], Sequence[Message]]) -> list[Message]:
        """The messages of a request in normal form; `parse(message, position)` is asked for those that are new."""
        old, same = _History([], [], []), 0
        for known in self._known:
            if (n := known.same(given)) > same:
                old, same = known, n
        ends = old.ends[:same]
        messages = old.messages[: ends[-1] if ends else 0]
        for i in range(same, len(given)):
            if too_deep(given[i], DEEPEST_MESSAGE):
                raise GatewayError("bad_request", f"Message {i} is nested more than {DEEPEST_MESSAGE} levels deep.")
            messages += parse(given[i], i)
            ends.append(len(messages))
        if same and same == len(old.raws):
            self._known.remove(old)
        self._known.append(_History([*old.raws[:same], *given[same:]], messages, ends))
        return messages.copy()
