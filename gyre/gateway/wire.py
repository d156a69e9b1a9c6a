"""The wire formats that the gateway speaks. A format is a module with these functions; adding one adds a line here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from gyre.gateway import openai_chat
from gyre.gateway.errors import GatewayError
from gyre.gateway.messages import Message, Request
from gyre.gateway.result import Result


class WireFormat(Protocol):
    """One provider's API."""

    API: str

    def parse_request(self, body: bytes, model: str) -> Request:
        """A request body in normal form. Raises GatewayError."""

    def parse_message(self, data: Any, where: str) -> Message:
        """One message in normal form. Raises GatewayError."""

    def response(self, result: Result, model: str) -> bytes:
        """The body of a whole answer."""

    def chunks(self, result: Result, model: str, *, usage: bool) -> Iterator[bytes]:
        """The answer as server-sent events."""

    def error_body(self, error: GatewayError) -> bytes:
        """An error in the provider's shape."""


FORMATS: dict[str, WireFormat] = {openai_chat.API: openai_chat}
