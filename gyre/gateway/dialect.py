"""What a harness's calls say of themselves: which agent makes them, for what, and how it echoes what was sampled.

A dialect is small and pure. Each harness's module (gyre.harness) has one; `PLAIN` is that of a harness of which nothing
is known: kinds then come from the shape of the tree alone (gyre.gateway.conversation).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from gyre.gateway.messages import Message, Request, difference

Kind = Literal["main", "main-summary", "sub-agent", "sub-agent-summary", "auxiliary"]


@dataclass(frozen=True, slots=True)
class Hint:
    """What a dialect knows of a call. `kind` None: not known, the tree's structure decides.

    `agent` names the agent within the rollout that makes the call ("" for the main one, or where nothing says): of
    branches that a call could go on from, its own agent's comes first.
    """

    kind: Kind | None = None
    agent: str = ""


class Dialect(Protocol):
    """How one harness speaks."""

    name: str

    def normalise(self, request: Request) -> Request:
        """The request without what changes from call to call and means nothing (headers in the system text …)."""

    def hint(self, headers: Mapping[str, str], request: Request) -> Hint:
        """What headers (names in lower case) and shape say of the call."""

    def difference(self, emitted: Message, echoed: Message) -> str | None:
        """Why `echoed` is not the assistant message `emitted`; None where it is (see gyre.gateway.messages)."""


class Plain:
    """Nothing is known of the harness."""

    name = "plain"

    def normalise(self, request: Request) -> Request:
        return request

    def hint(self, headers: Mapping[str, str], request: Request) -> Hint:
        return Hint()

    def difference(self, emitted: Message, echoed: Message) -> str | None:
        return difference(emitted, echoed)


PLAIN = Plain()
