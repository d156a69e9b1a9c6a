"""What the trainer process and its client say to each other: JSON objects, one a line, over a unix socket.

    {"id": 1, "command": "micro_batch", "arguments": {"micro_batch_id": 7}}
    {"id": 1, "result": {...}}   or   {"id": 1, "error": {"type": "LedgerError", "message": "..."}}

Central's trainer takes pushes over TCP too, where cells are on several machines: then each request holds the `token`
that the trainer was started with, and only the commands of `FROM_AFAR` are answered.

Free of torch: a cell's agent imports it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

REFUSALS = ("LedgerError", "CommandError")
"""Kinds of error that are answers to a caller who looked too early or too late, not faults of the trainer."""

FENCED = "FencedError"
"""Kind of error of a trainer whose cell another agent has taken; it ends after this answer."""

DATABASE_LOST = ("OperationalError", "InternalError")
"""Kinds of error of a trainer that could not reach Postgres, or had its transaction ended there. Nothing was changed,
or what was is found when the command is sent again."""

WRONG_TOKEN = "TokenError"
"""Kind of error of a trainer that is not the one looked up: another listens at that address by now."""

FROM_AFAR = ("status", "absorb")
"""Commands that central's trainer takes over TCP, from the agents of other cells."""

TOKEN = "GYRE_TRAINER_TOKEN"
"""Environment variable: what a request over TCP must say. Without it a trainer listens at its unix socket alone."""

LINE_LIMIT = 1 << 20
"""Longest line, in bytes."""

RENDEZVOUS = "GYRE_TRAINER_RENDEZVOUS"
"""Environment variable: a file through which a trainer's ranks on one machine find each other. RANK, WORLD_SIZE and
LOCAL_RANK are beside it, as `torchrun` sets them."""

KEEPER = "GYRE_TRAINER_KEEPER"
"""Environment variable: pid of the agent that started the trainer."""


@dataclass(frozen=True)
class TrainerStatus:
    """State of a trainer process; answered at once, also while it computes."""

    incarnation: str
    """Random name of this life of the process: who holds gradients in the ledger."""
    version: int | None
    """Policy version of the weights; None while none is loaded."""
    step_id: int | None
    """Step whose gradient accumulates."""
    held: int
    """Micro-batches in the accumulator."""
    pushed: bool
    """Its gradient is published for central and waits for `reset`: until then it takes no micro-batch."""
    asleep: bool
    busy: str | None
    """The command that runs; `start` until the process is ready; None: idle."""
    waiting: int
    """Commands that wait for it."""
    address: str | None = None
    """`host:port` at which it listens for other machines, if it does."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)


@dataclass(frozen=True)
class Endpoint:
    """Where the trainer of a cell on another machine is reached. `token` is new in every life of it."""

    address: str
    token: str

    def __str__(self) -> str:
        return self.address

    def to_json(self) -> dict[str, str]:
        return {"address": self.address, "token": self.token}


class TrainerError(Exception):
    """The trainer refused or failed a command. `kind` is the name of its exception."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class TrainerUnavailable(ConnectionError):
    """No trainer answers at the socket or address, or it went away before it answered."""


@contextlib.contextmanager
def short_address(socket: Path) -> Iterator[str]:
    """An address of `socket` for the length of the block: a unix address holds 107 bytes, a path may be longer."""
    folder = os.open(socket.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{socket.name}"
    finally:
        os.close(folder)
