"""A finished call, as wire formats need it."""

from __future__ import annotations

from dataclasses import dataclass

from gyre.gateway.messages import Message
from gyre.gateway.tree import Turn


@dataclass(frozen=True, slots=True)
class Result:
    """An answer with its usage. `finish_reason` is 'stop' or 'length'; `stop_string` the harness's that ended it."""

    call_id: int
    created: int
    reply: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    stop_string: str | None = None

    @classmethod
    def of(cls, turn: Turn) -> Result:
        """The result that `turn` holds."""
        return cls(
            call_id=turn.call_id,
            created=turn.created,
            reply=turn.reply,
            finish_reason=turn.finish_reason,
            prompt_tokens=turn.prompt.end,
            completion_tokens=len(turn.generated.ids),
            cached_tokens=turn.cached_tokens,
            stop_string=turn.stop_string,
        )
