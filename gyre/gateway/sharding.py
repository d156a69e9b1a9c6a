"""Which of several gateway processes a rollout's calls go to.

Each rollout belongs to one process, chosen by its token (rendezvous hashing over the processes' numbers), and its base
URL is that process's: no call passes through another. Changing the number of processes moves only the rollouts that
the new, or the gone, process has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from gyre.gateway.errors import GatewayError


@dataclass(frozen=True, slots=True)
class Shard:
    """This process among all: `urls[index]` is its own."""

    index: int = 0
    urls: tuple[str, ...] = ("",)

    def check(self, token: str) -> None:
        """Raises GatewayError (421) where the rollout with this token belongs to another process."""
        if (owner := shard_of(token, len(self.urls))) != self.index:
            raise GatewayError(
                "misdirected",
                f"This rollout's calls go to {self.urls[owner]}; this gateway process does not have its conversation.",
            )


ALONE = Shard()
"""The only process."""


def shard_of(token: str, count: int) -> int:
    """The number of the process, 0 to `count` - 1, that a rollout belongs to."""
    if count == 1:
        return 0
    return max(range(count), key=lambda i: hashlib.sha256(f"{i}/{token}".encode()).digest())


def url_of(token: str, urls: Sequence[str]) -> str:
    """The base URL of the process that a rollout belongs to."""
    return urls[shard_of(token, len(urls))]
