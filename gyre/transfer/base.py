"""What every transfer backend does: publish named tensors by version, pull them untorn.

A publisher copies its tensors into one of two slots and then makes that slot the current one, so a puller has one
whole publish interval to read it. A sequence number per slot, odd while the slot is written, tells a puller that was
overtaken; an XXH3 checksum over the slot tells corruption. A puller reads into a buffer of its own, sums piece by piece
while the next ones are on their way, and hands tensors out only when both checks pass: what the caller holds from an
earlier pull is never touched.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, Self

import torch
import xxhash

Backend = Literal["mooncake", "socket"]

SLOTS = 2
ALIGNMENT = 64
"""Bytes to which each tensor's offset in a slot is rounded up."""


class TransferError(RuntimeError):
    """A transfer failed; nothing the caller held has changed."""


class PublisherGone(TransferError):
    """The publisher does not answer (any more)."""


class StaleTicket(TransferError):
    """Another publisher answers at the ticket's address: this one has been restarted. Get its new ticket."""


class LappedTransfer(TransferError):
    """The publisher wrote over the slot while it was read. Pulling again may succeed."""


class CorruptTransfer(TransferError):
    """The bytes that arrived are not those that were published."""


@dataclass(frozen=True)
class Ticket:
    """Where and how to pull; made by a publisher, passed through Postgres as JSON."""

    backend: Backend
    address: str
    """host:port."""
    incarnation: int
    """Random number of the publisher's life, below 2^62."""
    version: int
    """The version published when the ticket was made; a pull may bring a newer one."""
    detail: dict[str, Any] = field(default_factory=dict)
    """The backend's own facts (token, addresses)."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Back from `to_json`. Raises TransferError: a field is missing, unknown or of an unknown backend."""
        try:
            ticket = cls(**data)
        except TypeError as error:
            raise TransferError(f"ticket {sorted(data)}: {error}") from error
        if ticket.backend not in ("mooncake", "socket"):
            raise TransferError(f"ticket.backend: {ticket.backend!r} is unknown; use a version that made this ticket")
        return ticket


class WeightPublisher(Protocol):
    """Publishes one set of tensors, again and again, each time under a version."""

    def publish(self, version: int) -> Ticket:
        """Copy the tensors as they are now, and make them what a pull brings. Blocks for one copy."""
        ...

    def close(self) -> None:
        """Stop serving; later pulls fail with PublisherGone."""
        ...


class WeightPuller(Protocol):
    """Pulls from one publisher. Tensors of a pull stay valid until the next but one."""

    def pull(self) -> tuple[int, dict[str, torch.Tensor]]:
        """The version and the tensors that are current. Raises TransferError (see its subclasses)."""
        ...

    def close(self) -> None:
        """Free buffers and connections."""
        ...


@dataclass(frozen=True)
class Entry:
    """A tensor's place in a slot."""

    offset: int
    nbytes: int
    dtype: str
    shape: list[int]


class Layout:
    """Where each tensor lies in a slot of `nbytes` bytes."""

    def __init__(self, entries: dict[str, Entry], nbytes: int) -> None:
        self.entries, self.nbytes = entries, nbytes

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Layout:
        """The layout that holds `tensors` in their order."""
        entries, offset = {}, 0
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries[name] = Entry(offset, tensor.nbytes, dtype, list(tensor.shape))
            offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if not offset:
            raise TransferError("nothing to publish: no tensor, or only empty ones")
        return cls(entries, offset)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {"nbytes": self.nbytes, "tensors": {n: asdict(e) for n, e in self.entries.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        """Back from `to_json`."""
        return cls({n: Entry(**e) for n, e in data["tensors"].items()}, int(data["nbytes"]))

    def views(self, slot: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors inside `slot` (uint8 [nbytes]), without a copy."""
        return {
            name: slot[e.offset : e.offset + e.nbytes].view(getattr(torch, e.dtype)).view(e.shape)
            for name, e in self.entries.items()
        }


_PIECE = 1 << 20


class Checksum:
    """XXH3 of bytes as they come (https://github.com/Cyan4973/xxHash), cut to 63 bits so that an int64 holds it.

    It finds corruption at about the speed of memory; it is no defence against somebody who forges.
    """

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def add(self, piece: torch.Tensor) -> None:
        """The next bytes: a contiguous uint8 tensor on the CPU."""
        data = piece.numpy().data
        for start in range(0, len(data), _PIECE):  # in pieces: the GIL is held for one at a time
            self._state.update(data[start : start + _PIECE])

    @property
    def value(self) -> int:
        """Of all bytes so far."""
        return self._state.intdigest() >> 1


def new_incarnation() -> int:
    """A random number for one publisher's life."""
    return secrets.randbits(62)


@dataclass
class SlotState:
    """What the publisher says of one slot. `seq` is odd while it is written."""

    seq: int = 0
    version: int = -1
    checksum: int = 0


class Slots:
    """The publisher's side of double buffering, over buffers that a backend makes readable."""

    def __init__(self, params: Mapping[str, torch.Tensor]) -> None:
        self.params = dict(params)
        self.layout = Layout.of(self.params)
        self.buffers = [torch.zeros(self.layout.nbytes, dtype=torch.uint8) for _ in range(SLOTS)]
        self.views = [self.layout.views(b) for b in self.buffers]
        self.current = -1
        self.lock = threading.Lock()  # one publish at a time

    @torch.no_grad()
    def fill(self, slot: int) -> int:
        """Copy the tensors into `slot`; returns its checksum."""
        for name, tensor in self.params.items():
            self.views[slot][name].copy_(tensor)
        found = Checksum()
        found.add(self.buffers[slot])
        return found.value


class Staging:
    """The puller's side of double buffering: tensors of the newest pull lie in one buffer, the next goes to the other.

    A buffer is made when it is first needed: whoever pulls once pays for one. Fresh memory costs more time than the
    bytes that fill it, so keep a puller that will be used again.
    """

    def __init__(self, register: Callable[[torch.Tensor], torch.Tensor] = lambda buffer: buffer) -> None:
        self._register = register
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._live = 0

    def spare(self, nbytes: int) -> torch.Tensor:
        """The buffer (uint8 [nbytes]) that nobody reads."""
        spare = self._buffers[1 - self._live]
        if spare is None or spare.nbytes != nbytes:
            spare = self._buffers[1 - self._live] = self._register(torch.empty(nbytes, dtype=torch.uint8))
        return spare

    def swap(self) -> None:
        """The spare buffer holds a whole pull now."""
        self._live = 1 - self._live


def retry_lapped(
    attempt: Callable[[], tuple[int, dict[str, torch.Tensor]]], retries: int = 20, pause_s: float = 0.05
) -> tuple[int, dict[str, torch.Tensor]]:
    """Call `attempt` until it is not lapped; raises LappedTransfer after `retries` more tries."""
    for i in range(retries + 1):
        try:
            return attempt()
        except LappedTransfer:
            if i == retries:
                raise
            time.sleep(pause_s * min(i + 1, 10))
    raise AssertionError("unreachable")
