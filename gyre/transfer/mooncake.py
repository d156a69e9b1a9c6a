"""Transfer by Mooncake's Transfer Engine: one-sided reads over TCP (or RDMA), addresses handed over in the ticket.

The publisher registers its two slots, a manifest (JSON of the layout) and a header of int64: magic, incarnation,
manifest address, manifest length, current slot, and from `_SLOT0` on three words a slot (seq, version, checksum). The
header's words are aligned and written one at a time; on x86 over TCP a reader sees them in order, and the checksum
covers the rest (RDMA, weaker memory models).

A read that is given up may still come: the engine connects anew when the network is whole again, and then writes to
where it was told to. So a puller asks for each read's end itself, and what is still on the way keeps its memory until
it has ended, however long after the pull. (The engine's calls that wait give up without telling that from a failure.)
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections import deque
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gyre.ports import LOOPBACK
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

# Silence after which the engine drops a connection; its own defaults let a stopped peer hang for half a minute.
_TIMEOUTS = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "8", "MC_TCP_STATUS_TIMEOUT_SEC": "8"}
SILENCE_S = 10.0
"""How long a pull waits for the next of its chunks: also for a connection, for which the engine has no limit."""
_POLL_S = 0.0002

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
    """Registered memory of one owner, and what is on its way there; given back by `close`, or when the owner is
    collected.

    An address that stays registered after its memory was freed makes the next registration that overlaps it fail.
    """

    def __init__(self, host: str) -> None:
        _give_back_late()
        self.engine = engine(host)
        self._registered: dict[int, torch.Tensor] = {}  # keeps them alive
        self._coming: set[int] = set()
        """Numbers of the reads that have not ended."""
        self._finalizer = weakref.finalize(self, _give_back, self.engine, self._registered, self._coming)
        self._finalizer.atexit = False

    def register(self, tensor: torch.Tensor) -> torch.Tensor:
        if (code := self.engine.register_memory(tensor.data_ptr(), tensor.nbytes)) != 0:
            raise TransferError(f"Mooncake: register_memory of {tensor.nbytes} bytes failed: code {code}")
        self._registered[tensor.data_ptr()] = tensor
        return tensor

    def release(self, tensor: torch.Tensor) -> None:
        self.engine.unregister_memory(tensor.data_ptr())
        del self._registered[tensor.data_ptr()]

    def begin(self, peer: str, target: torch.Tensor, address: int) -> int | None:
        """Have the peer's bytes from `address` on come into `target`; the read's number, None if it has failed."""
        read: int = self.engine.batch_transfer_async_read(peer, [target.data_ptr()], [address], [target.nbytes])
        if read in _NO_BATCH:
            return None
        self._coming.add(read)
        return read

    def arrived(self, read: int) -> bool:
        """Wait for a read; False: it has failed, or nothing came of it for SILENCE_S seconds."""
        deadline = time.monotonic() + SILENCE_S
        while not _ended(code := self.engine.transfer_check_status(read)):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        self._coming.remove(read)
        return bool(code == _ARRIVED)

    def close(self) -> None:
        self._finalizer()


_ARRIVED, _FAILED = 1, -1


def _ended(code: int) -> bool:
    """The engine's answer about a read is its last; it knows the number no more."""
    return code in (_ARRIVED, _FAILED)


_late: deque[tuple[Any, dict[int, torch.Tensor], set[int]]] = deque()
"""Memory whose owner is gone, while something may still be written to it. Any thread takes from it and puts to it, each
entry at once and whole. No lock: memory is given back where its owner is collected, which may be inside the lock."""


def _give_back(transfer_engine: Any, registered: dict[int, torch.Tensor], coming: set[int]) -> None:
    for read in list(coming):
        if _ended(transfer_engine.transfer_check_status(read)):
            coming.remove(read)
    if coming:
        _late.append((transfer_engine, registered, coming))
        return
    for address in registered:
        transfer_engine.unregister_memory(address)
    registered.clear()


def _give_back_late() -> None:
    for _ in range(len(_late)):
        try:
            memory = _late.popleft()
        except IndexError:  # another thread has taken the rest
            return
        _give_back(*memory)


class MooncakePublisher:
    """Two registered slots that pullers read by themselves."""

    def __init__(self, params: Mapping[str, torch.Tensor], host: str = LOOPBACK) -> None:
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

    def __init__(self, ticket: Ticket, host: str = LOOPBACK, chunk: int = _CHUNK) -> None:
        self._ticket, self._host, self._chunk = ticket, host, chunk
        self._begin()

    def _begin(self) -> None:
        self._memory = _Memory(self._host)
        self._words = self._memory.register(torch.zeros(_LENGTH, dtype=torch.int64))
        self._slots: list[int] = []
        self._layout: Layout | None = None
        self._staging = Staging(self._memory.register)

    def pull(self) -> tuple[int, dict[str, torch.Tensor]]:
        """See WeightPuller."""
        try:
            return retry_lapped(self._attempt)
        except PublisherGone:
            self._memory.close()  # what still comes must not meet the next pull
            self._begin()
            raise

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
        read = self._memory.begin(self._ticket.address, target, address)
        if read is None or not self._memory.arrived(read):
            raise self._gone()

    def _read_slot(self, address: int, target: torch.Tensor, found: Checksum) -> None:
        """Read `target.nbytes` bytes; each chunk is summed while the next ones come."""
        on_the_way: deque[tuple[int, torch.Tensor]] = deque()
        for start in range(0, target.nbytes, self._chunk):
            chunk = target[start : start + self._chunk]
            read = self._memory.begin(self._ticket.address, chunk, address + start)
            if read is None:
                raise self._gone()
            on_the_way.append((read, chunk))
            if len(on_the_way) == _AHEAD:
                self._arrived(*on_the_way.popleft(), found)
        while on_the_way:
            self._arrived(*on_the_way.popleft(), found)

    def _arrived(self, read: int, chunk: torch.Tensor, found: Checksum) -> None:
        if not self._memory.arrived(read):
            raise self._gone()
        found.add(chunk)

    def _gone(self) -> PublisherGone:
        return PublisherGone(f"publisher at {self._ticket.address} is gone; wait for a new ticket")
