"""The wire formats that the gateway speaks. A format is a module with these functions; adding one adds a line here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from gyre.gateway import anthropic_messages, openai_chat, openai_responses
from gyre.gateway.errors import GatewayError
from gyre.gateway.messages import Message, Request
from gyre.gateway.reading import Reading
from gyre.gateway.result import Result


class WireFormat(Protocol):
    """One provider's API."""

    API: str
    """Name of the format, as `calls.api` has it."""
    PING: bytes
    """What keeps a stream alive while the answer is not there."""

    def parse_request(self, body: bytes, model: str, reading: Reading | None = None) -> Request:
        """A request body in normal form; `reading` knows what came before. Raises GatewayError."""

    def parse_message(self, data: Any, where: str) -> Message:
        """One message in normal form, from what `Message.raw` holds: a piece of wire that is exactly one message.

        Where one message of the wire is several in normal form (tool results beside text), each has a raw of its own.
        Raises GatewayError.
        """

    def response(self, result: Result, model: str, request: Request) -> bytes:
        """The body of a whole answer to `request`."""

    def chunks(self, result: Result, model: str, request: Request) -> Iterator[bytes]:
        """The answer to `request` as server-sent events."""

    def error_body(self, error: GatewayError) -> bytes:
        """An error in the provider's shape."""

    def error_event(self, error: GatewayError) -> bytes:
        """An error on a stream that has begun."""


FORMATS: dict[str, WireFormat] = {
    openai_chat.API: openai_chat,
    openai_responses.API: openai_responses,
    anthropic_messages.API: anthropic_messages,
}
