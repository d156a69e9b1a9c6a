"""What the trainer process and its client say to each other: JSON objects, one a line, over a unix socket.

    {"id": 1, "command": "micro_batch", "arguments": {"micro_batch_id": 7}}
    {"id": 1, "result": {...}}   or   {"id": 1, "error": {"type": "LedgerError", "message": "..."}}

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

BESIDE = ("prefetch",)
"""Commands that run while another one computes: they touch nothing that a computation uses."""

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

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)


class TrainerError(Exception):
    """The trainer refused or failed a command. `kind` is the name of its exception."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class TrainerUnavailable(ConnectionError):
    """No trainer answers at the socket, or it went away before it answered."""


@contextlib.contextmanager
def short_address(socket: Path) -> Iterator[str]:
    """An address of `socket` for the length of the block: a unix address holds 107 bytes, a path may be longer."""
    folder = os.open(socket.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{socket.name}"
    finally:
        os.close(folder)
