"""Transfer over plain TCP sockets: for machines where Mooncake's library cannot load.

A pull is one connection. Each message is a frame: 4 bytes of length (big-endian), then JSON. Request:
`{"incarnation", "token"}`. Answer: a frame with the current slot's seq, version, checksum and layout, then the slot's
bytes, then a frame with the slot's seq as it is now: if the two differ the slot was written over meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import socketserver
import struct
import threading
from collections.abc import Mapping
from typing import Any

import torch

from gyre.ports import LOOPBACK, is_token
from gyre.transfer.base import (
    Checksum,
    CorruptTransfer,
    LappedTransfer,
    Layout,
    PublisherGone,
    Slots,
    SlotState,
    Staging,
    StaleTicket,
    Ticket,
    TransferError,
    new_incarnation,
    retry_lapped,
)

TIMEOUT_S = 10.0
"""Silence of the other side after which it counts as gone."""

_PIECE = 1 << 20
"""Bytes asked of the kernel at once: few enough that they are summed while the processor's cache still has them."""
_LENGTH = struct.Struct(">I")
_REQUEST_LIMIT = 4096
_FRAME_LIMIT = 64 << 20


class SocketPublisher:
    """Serves the two slots from a thread per pull."""

    def __init__(self, params: Mapping[str, torch.Tensor], host: str = LOOPBACK) -> None:
        self._slots = Slots(params)
        self._states = [SlotState() for _ in self._slots.buffers]
        self._incarnation, self._token = new_incarnation(), secrets.token_urlsafe(24)
        publisher = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, _Ended):  # the puller went away: its own affair
                    publisher._serve(self.request)

        self._server = socketserver.ThreadingTCPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._address = "{}:{}".format(*self._server.server_address[:2])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.5}, name="transfer", daemon=True
        )
        self._thread.start()

    def publish(self, version: int) -> Ticket:
        """See WeightPublisher."""
        with self._slots.lock:
            slot = (self._slots.current + 1) % len(self._states)
            state = self._states[slot]
            state.seq += 1  # odd: being written
            state.checksum = self._slots.fill(slot)
            state.version = version
            state.seq += 1
            self._slots.current = slot
        return Ticket("socket", self._address, self._incarnation, version, {"token": self._token})

    def close(self) -> None:
        """See WeightPublisher."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(TIMEOUT_S)
        refusal = self._refuse(_frame(connection, _REQUEST_LIMIT))
        if refusal:
            _send(connection, {"error": refusal})
            return
        slot = self._slots.current
        state = self._states[slot]
        head = {
            "seq": state.seq,
            "version": state.version,
            "checksum": state.checksum,
            "layout": self._slots.layout.to_json(),
        }
        _send(connection, head)
        data = self._slots.buffers[slot].numpy().data
        for start in range(0, len(data), _PIECE):
            connection.sendall(data[start : start + _PIECE])
        _send(connection, {"seq": state.seq})

    def _refuse(self, request: dict[str, Any]) -> str:
        if request.get("incarnation") != self._incarnation:
            return "stale"
        if not is_token(request.get("token", ""), self._token):
            return "token"
        return "" if self._slots.current >= 0 else "empty"


class SocketPuller:
    """Pulls over one connection each time."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        host, _, port = ticket.address.rpartition(":")
        self._address = (host, int(port))
        self._staging = Staging()

    def pull(self) -> tuple[int, dict[str, torch.Tensor]]:
        """See WeightPuller."""
        return retry_lapped(self._attempt)

    def close(self) -> None:
        """See WeightPuller."""
        self._staging = Staging()

    def _attempt(self) -> tuple[int, dict[str, torch.Tensor]]:
        found = Checksum()
        try:
            with socket.create_connection(self._address, TIMEOUT_S) as connection:
                _send(connection, {"incarnation": self._ticket.incarnation, "token": self._ticket.detail.get("token")})
                head = _frame(connection, _FRAME_LIMIT)
                if "error" in head:
                    raise self._refused(str(head["error"]))
                layout = Layout.from_json(head["layout"])
                buffer = self._staging.spare(layout.nbytes)
                _read_into(connection, buffer, found)
                tail = _frame(connection, _FRAME_LIMIT)
        except (OSError, _Ended) as error:
            raise PublisherGone(
                f"publisher at {self._ticket.address} is gone; wait for a new ticket ({error})"
            ) from error
        if head["seq"] & 1 or tail["seq"] != head["seq"]:
            raise LappedTransfer(f"{self._ticket.address}: slot rewritten while read, {head['seq']} -> {tail['seq']}")
        if found.value != head["checksum"]:
            raise CorruptTransfer(f"{self._ticket.address}: checksum of version {head['version']} does not match")
        self._staging.swap()
        return int(head["version"]), layout.views(buffer)

    def _refused(self, reason: str) -> TransferError:
        where = self._ticket.address
        if reason == "stale":
            return StaleTicket(f"publisher at {where} has been restarted; get its new ticket")
        if reason == "empty":
            return TransferError(f"publisher at {where} has published nothing yet")
        return TransferError(f"publisher at {where} refused the ticket: {reason}")


class _Ended(Exception):
    """The connection ended, or says what no frame is."""


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _frame(connection: socket.socket, limit: int) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > limit:
        raise _Ended(f"a frame of {length} bytes")
    try:
        found = json.loads(_exactly(connection, length))
    except ValueError as error:
        raise _Ended("a frame that is no JSON") from error
    if not isinstance(found, dict):
        raise _Ended("a frame that is no JSON object")
    return found


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    view = memoryview(data)
    done = 0
    while done < nbytes:
        if not (n := connection.recv_into(view[done:])):
            raise _Ended("connection ended")
        done += n
    return bytes(data)


def _read_into(connection: socket.socket, target: torch.Tensor, found: Checksum) -> None:
    """Fill `target` (uint8), and sum the bytes as they come."""
    view = target.numpy().data
    done = 0
    while done < len(view):
        n = connection.recv_into(view[done : done + _PIECE])
        if not n:
            raise _Ended(f"connection ended after {done} of {len(view)} bytes")
        found.add(target[done : done + n])
        done += n
