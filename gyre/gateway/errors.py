"""Errors that a harness sees. Each wire format gives them its provider's own shape."""

from __future__ import annotations

from typing import Literal

ErrorKind = Literal[
    "bad_request",
    "context_overflow",
    "unknown_model",
    "unauthorized",
    "forbidden",
    "misdirected",
    "not_found",
    "too_large",
    "unavailable",
    "internal",
]

STATUS: dict[ErrorKind, int] = {
    "bad_request": 400,
    "context_overflow": 400,
    "unknown_model": 404,
    "unauthorized": 401,
    "forbidden": 403,
    "misdirected": 421,
    "not_found": 404,
    "too_large": 413,
    "unavailable": 503,
    "internal": 500,
}


class GatewayError(Exception):
    """A call that gets an error instead of an answer.

    `message` is one line for the harness's author; `param` names the request field at fault, where one is. `overflow`
    is (tokens of the prompt, tokens of the context), for a format that words a context overflow in its own way.
    """

    def __init__(
        self, kind: ErrorKind, message: str, param: str | None = None, overflow: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message)
        self.overflow = overflow
        self.kind: ErrorKind = kind
        self.message = message
        self.param = param

    @property
    def status(self) -> int:
        """HTTP status."""
        return STATUS[self.kind]


def context_overflow(prompt_tokens: int, context: int) -> GatewayError:
    """The prompt leaves no room in the context. The wording is OpenAI's, which harnesses look for."""
    return GatewayError(
        "context_overflow",
        f"This model's maximum context length is {context} tokens. However, your messages resulted in {prompt_tokens} "
        "tokens. Please reduce the length of the messages.",
        "messages",
        (prompt_tokens, context),
    )
