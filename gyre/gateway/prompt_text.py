"""Prompts as the JSON that engines read. A branch's ids are written out once, not once a turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import orjson

from gyre.gateway.conversation import Plan
from gyre.gateway.nodes import Ids

KEPT_BYTES = 4_000_000
"""Text that one rollout keeps, newest first: two branches of 250,000 tokens."""


class PromptText:
    """The ids of a rollout's newest turns as text, by call."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[bytes, bytes]] = OrderedDict()
        """Prompt and answer, apart: joining them here would copy megabytes that the next prompt copies again."""
        self._size = 0

    def of(self, planned: Plan) -> bytes:
        """The prompt's ids, comma-separated."""
        if planned.twin is not None:
            return text_of(planned.twin.prompt.tokens())
        if planned.anchor is None:
            return text_of(planned.new_ids)
        kept = self._kept.get(planned.anchor.call_id)
        before = (text_of(planned.anchor.generated.tokens()),) if kept is None else kept
        return b",".join([*before, text_of(planned.new_ids)])

    def keep(self, call_id: int, prompt: bytes, answer: Sequence[int], before: int | None) -> None:
        """Remember a finished turn; the turn that it went on from is forgotten (a sibling writes that one out anew)."""
        if before is not None and (old := self._kept.pop(before, None)) is not None:
            self._size -= _bytes(old)
        self._kept[call_id] = kept = (prompt, text_of(np.asarray(answer, np.int32)))
        self._size += _bytes(kept)
        while self._size > KEPT_BYTES:
            _, old = self._kept.popitem(last=False)
            self._size -= _bytes(old)


def _bytes(kept: tuple[bytes, bytes]) -> int:
    return sum(map(len, kept))


def text_of(ids: Ids) -> bytes:
    """Ids, comma-separated."""
    return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
