"""Transfer by Mooncake's Transfer Engine: one-sided reads over TCP (or RDMA), addresses handed over in the ticket.

The publisher registers its two slots, a manifest (JSON of the layout) and a header of int64: magic, incarnation,
manifest address, manifest length, current slot, and from `_SLOT0` on three words a slot (seq, version, checksum). The
header's words are aligned and written one at a time; on x86 over TCP a reader sees them in order, and the checksum
covers the rest (RDMA, weaker memory models).
"""

from __future__ import annotations

import json
import os
import weakref
from collections import deque
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gyre.transfer.base import (
    Checksum,
    CorruptTransfer,
    LappedTransfer,
    Layout,
    PublisherGone,
    Slots,
    Staging,
    StaleTicket,
    Ticket,
    TransferError,
    new_incarnation,
    retry_lapped,
)

_MAGIC = 0x4759_5245
_MAGIC_AT, _INCARNATION, _MANIFEST, _MANIFEST_LEN, _CURRENT, _SLOT0, _LENGTH = 0, 1, 2, 3, 4, 8, 16
_SEQ, _VERSION, _CHECKSUM, _WORDS = 0, 1, 2, 3
_CHUNK = 4 << 20
_AHEAD = 8
"""Chunks that are on their way at once."""
_MANIFEST_LIMIT = 64 << 20
_NO_BATCH = (0, (1 << 64) - 1)
"""What the engine answers instead of a batch's number where it cannot reach the peer."""

# Silence after which a stopped peer counts as gone; the engine's own defaults let a pull hang for half a minute.
_TIMEOUTS = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "8", "MC_TCP_STATUS_TIMEOUT_SEC": "8", "MC_TRANSFER_TIMEOUT": "10"}


_RDMA = Path("/sys/class/infiniband")


def rdma_devices() -> list[str]:
    """Names of this machine's RDMA devices."""
    return sorted(device.name for device in _RDMA.iterdir()) if _RDMA.is_dir() else []


class MooncakeUnavailable(TransferError):
    """Mooncake's library cannot be loaded or started here; the message says why."""


@cache
def engine(host: str) -> Any:
    """This process's Transfer Engine, listening on `host`: by RDMA where there is a device (which has not been tried),
    else by TCP. Raises MooncakeUnavailable."""
    for name, value in _TIMEOUTS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        from mooncake.engine import TransferEngine
    except (ImportError, OSError) as error:
        advice = "; install the package libibverbs1" if "libibverbs" in str(error) else ""
        raise MooncakeUnavailable(f"Mooncake cannot load: {error}{advice}") from error
    found = TransferEngine()
    if (code := found.initialize(host, "P2PHANDSHAKE", "rdma" if rdma_devices() else "tcp", "")) != 0:
        raise MooncakeUnavailable(f"Mooncake's Transfer Engine did not start on {host}: code {code}")
    return found


class _Memory:
    """Registered memory of one owner; given back by `close`, or when the owner is collected.

    An address that stays registered after its memory was freed makes the next registration that overlaps it fail.
    """

    def __init__(self, host: str) -> None:
        self.engine = engine(host)
        self._registered: dict[int, torch.Tensor] = {}  # keeps them alive
        self._finalizer = weakref.finalize(self, _unregister, self.engine, self._registered)
        self._finalizer.atexit = False

    def register(self, tensor: torch.Tensor) -> torch.Tensor:
        if (code := self.engine.register_memory(tensor.data_ptr(), tensor.nbytes)) != 0:
            raise TransferError(f"Mooncake: register_memory of {tensor.nbytes} bytes failed: code {code}")
        self._registered[tensor.data_ptr()] = tensor
        return tensor

    def release(self, tensor: torch.Tensor) -> None:
        self.engine.unregister_memory(tensor.data_ptr())
        del self._registered[tensor.data_ptr()]

    def close(self) -> None:
        self._finalizer()


def _unregister(transfer_engine: Any, registered: dict[int, torch.Tensor]) -> None:
    for address in registered:
        transfer_engine.unregister_memory(address)
    registered.clear()


class MooncakePublisher:
    """Two registered slots that pullers read by themselves."""

    def __init__(self, params: Mapping[str, torch.Tensor], host: str = "127.0.0.1") -> None:
        self._memory = _Memory(host)
        self._slots = Slots(params)
        for buffer in self._slots.buffers:
            self._memory.register(buffer)
        manifest = {"slots": [b.data_ptr() for b in self._slots.buffers], "layout": self._slots.layout.to_json()}
        blob = torch.frombuffer(bytearray(json.dumps(manifest).encode()), dtype=torch.uint8)
        self._memory.register(blob)
        self._header = self._memory.register(torch.zeros(_LENGTH, dtype=torch.int64))
        self._words = self._header.numpy()
        self._incarnation = new_incarnation()
        self._words[_INCARNATION], self._words[_CURRENT] = self._incarnation, -1
        self._words[_MANIFEST], self._words[_MANIFEST_LEN] = blob.data_ptr(), blob.nbytes
        self._words[_MAGIC_AT] = _MAGIC
        self._address = f"{host}:{self._memory.engine.get_rpc_port()}"

    def publish(self, version: int) -> Ticket:
        """See WeightPublisher."""
        with self._slots.lock:
            slot = (self._slots.current + 1) % len(self._slots.buffers)
            at = _SLOT0 + _WORDS * slot
            self._words[at + _SEQ] += 1  # odd: being written
            self._words[at + _CHECKSUM] = self._slots.fill(slot)
            self._words[at + _VERSION] = version
            self._words[at + _SEQ] += 1
            self._words[_CURRENT] = self._slots.current = slot
        detail = {"header": self._header.data_ptr()}
        return Ticket("mooncake", self._address, self._incarnation, version, detail)

    def close(self) -> None:
        """See WeightPublisher."""
        self._words[_MAGIC_AT] = 0
        self._memory.close()


class MooncakePuller:
    """Reads a publisher's memory into two registered buffers, by turns."""

    def __init__(self, ticket: Ticket, host: str = "127.0.0.1", chunk: int = _CHUNK) -> None:
        self._ticket, self._chunk = ticket, chunk
        self._memory = _Memory(host)
        self._words = self._memory.register(torch.zeros(_LENGTH, dtype=torch.int64))
        self._slots: list[int] = []
        self._layout: Layout | None = None
        self._staging = Staging(self._memory.register)

    def pull(self) -> tuple[int, dict[str, torch.Tensor]]:
        """See WeightPuller."""
        return retry_lapped(self._attempt)

    def close(self) -> None:
        """See WeightPuller."""
        self._memory.close()

    def _attempt(self) -> tuple[int, dict[str, torch.Tensor]]:
        head = self._read_header()
        layout = self._read_manifest(head)
        slot = head[_CURRENT]
        if slot < 0:
            raise TransferError(f"publisher at {self._ticket.address} has published nothing yet")
        at = _SLOT0 + _WORDS * slot
        state = head[at : at + _WORDS]
        if state[_SEQ] & 1:
            raise LappedTransfer(f"{self._ticket.address}: slot {slot} is being rewritten")
        buffer, found = self._staging.spare(layout.nbytes), Checksum()
        self._read_slot(self._slots[slot], buffer, found)
        now = self._read_header()[at : at + _WORDS]
        if now != state:
            raise LappedTransfer(f"{self._ticket.address}: slot rewritten while read, {state[_SEQ]} -> {now[_SEQ]}")
        if found.value != state[_CHECKSUM]:
            raise CorruptTransfer(f"{self._ticket.address}: checksum of version {state[_VERSION]} does not match")
        self._staging.swap()
        return state[_VERSION], layout.views(buffer)

    def _read_header(self) -> list[int]:
        self._read(self._words, int(self._ticket.detail["header"]))
        words: list[int] = self._words.tolist()
        if words[_MAGIC_AT] != _MAGIC or words[_INCARNATION] != self._ticket.incarnation:
            raise StaleTicket(f"publisher at {self._ticket.address} has been restarted; get its new ticket")
        return words

    def _read_manifest(self, head: list[int]) -> Layout:
        if self._layout is None:
            if not 0 < head[_MANIFEST_LEN] <= _MANIFEST_LIMIT:
                raise CorruptTransfer(f"{self._ticket.address}: manifest of {head[_MANIFEST_LEN]} bytes")
            blob = self._memory.register(torch.zeros(head[_MANIFEST_LEN], dtype=torch.uint8))
            self._read(blob, head[_MANIFEST])
            manifest = json.loads(bytes(blob.numpy()))
            self._memory.release(blob)
            self._layout, self._slots = Layout.from_json(manifest["layout"]), manifest["slots"]
        return self._layout

    def _read(self, target: torch.Tensor, address: int) -> None:
        code = self._memory.engine.transfer_sync_read(self._ticket.address, target.data_ptr(), address, target.nbytes)
        if code != 0:
            raise self._gone(code)

    def _read_slot(self, address: int, target: torch.Tensor, found: Checksum) -> None:
        """Read `target.nbytes` bytes; each chunk is summed while the next ones come."""
        on_the_way: deque[tuple[int, torch.Tensor]] = deque()
        code = 0
        for start in range(0, target.nbytes, self._chunk):
            chunk = target[start : start + self._chunk]
            batch = self._memory.engine.batch_transfer_async_read(
                self._ticket.address, [chunk.data_ptr()], [address + start], [chunk.nbytes]
            )
            if batch in _NO_BATCH:
                code = -1
                break
            on_the_way.append((batch, chunk))
            if len(on_the_way) == _AHEAD and (code := self._arrived(*on_the_way.popleft(), found)) != 0:
                break
        while on_the_way:  # also after a failure: nothing may write to the buffer any more
            code = self._arrived(*on_the_way.popleft(), found) or code
        if code != 0:
            raise self._gone(code)

    def _arrived(self, batch: int, chunk: torch.Tensor, found: Checksum) -> int:
        """Wait for a chunk; the engine's code, 0 when it is here."""
        code: int = self._memory.engine.get_batch_transfer_status([batch])
        if code == 0:
            found.add(chunk)
        return code

    def _gone(self, code: int) -> PublisherGone:
        return PublisherGone(f"publisher at {self._ticket.address} is gone; wait for a new ticket (code {code})")
