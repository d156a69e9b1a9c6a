"""Transfer over a plain TCP socket: for machines where Mooncake's library cannot load.

A pull is one connection. Request, a JSON line: `{"incarnation", "token"}`. Answer: a JSON line with the current slot's
seq, version, CRC-32 and layout, then the slot's bytes, then a JSON line with the slot's seq as it is now: if the two
differ the slot was written over meanwhile.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import json
import secrets
import socket
import socketserver
import threading
from collections.abc import Mapping
from typing import Any

import torch

from gyre.transfer.base import (
    CorruptTransfer,
    LappedTransfer,
    Layout,
    PublisherGone,
    Slots,
    SlotState,
    StaleTicket,
    Ticket,
    TransferError,
    crc_of,
    new_incarnation,
    retry_lapped,
)

TIMEOUT_S = 10.0
"""Silence of the other side after which it counts as gone."""

_CHUNK = 1 << 20
_LINE_LIMIT = 64 << 20


class SocketPublisher:
    """Serves the two slots from a thread per pull."""

    def __init__(self, params: Mapping[str, torch.Tensor], host: str = "127.0.0.1") -> None:
        self._slots = Slots(params)
        self._states = [SlotState() for _ in self._slots.buffers]
        self._incarnation, self._token = new_incarnation(), secrets.token_urlsafe(24)
        publisher = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):  # the puller went away: its own affair
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
            state.crc = self._slots.fill(slot)
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
        with connection.makefile("rb") as lines:
            request = json.loads(lines.readline(4096) or b"{}")
        refusal = self._refuse(request)
        if refusal:
            connection.sendall(json.dumps({"error": refusal}).encode() + b"\n")
            return
        slot = self._slots.current
        state = self._states[slot]
        head = {
            "seq": state.seq,
            "version": state.version,
            "crc": state.crc,
            "layout": self._slots.layout.to_json(),
        }
        connection.sendall(json.dumps(head).encode() + b"\n")
        data = self._slots.buffers[slot].numpy().data
        for start in range(0, len(data), _CHUNK):
            connection.sendall(data[start : start + _CHUNK])
        connection.sendall(json.dumps({"seq": state.seq}).encode() + b"\n")

    def _refuse(self, request: dict[str, Any]) -> str:
        if request.get("incarnation") != self._incarnation:
            return "stale"
        if not hmac.compare_digest(str(request.get("token", "")), self._token):
            return "token"
        return "" if self._slots.current >= 0 else "empty"


class SocketPuller:
    """Pulls over one connection each time."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        host, _, port = ticket.address.rpartition(":")
        self._address = (host, int(port))
        self._buffers: list[torch.Tensor] = []
        self._live = 0

    def pull(self) -> tuple[int, dict[str, torch.Tensor]]:
        """See WeightPuller."""
        return retry_lapped(self._attempt)

    def close(self) -> None:
        """See WeightPuller."""
        self._buffers = []

    def _attempt(self) -> tuple[int, dict[str, torch.Tensor]]:
        gone = f"publisher at {self._ticket.address} is gone; wait for a new ticket"
        try:
            with (
                socket.create_connection(self._address, TIMEOUT_S) as connection,
                io.BufferedReader(socket.SocketIO(connection, "r"), _CHUNK) as stream,
            ):
                request = {"incarnation": self._ticket.incarnation, "token": self._ticket.detail.get("token")}
                connection.sendall(json.dumps(request).encode() + b"\n")
                head = _line(stream, gone)
                if "error" in head:
                    raise self._refused(str(head["error"]))
                layout = Layout.from_json(head["layout"])
                buffer = self._staging(layout.nbytes)
                _read_into(stream, buffer.numpy().data, gone)
                tail = _line(stream, gone)
        except OSError as error:
            raise PublisherGone(f"{gone} ({error})") from error
        if head["seq"] & 1 or tail["seq"] != head["seq"]:
            raise LappedTransfer(f"{self._ticket.address}: slot rewritten while read, {head['seq']} -> {tail['seq']}")
        if crc_of(buffer) != head["crc"]:
            raise CorruptTransfer(f"{self._ticket.address}: CRC-32 of version {head['version']} does not match")
        self._live = 1 - self._live
        return int(head["version"]), layout.views(buffer)

    def _staging(self, nbytes: int) -> torch.Tensor:
        if not self._buffers or self._buffers[0].nbytes != nbytes:
            self._buffers = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2)]
        return self._buffers[1 - self._live]

    def _refused(self, reason: str) -> TransferError:
        where = self._ticket.address
        if reason == "stale":
            return StaleTicket(f"publisher at {where} has been restarted; get its new ticket")
        if reason == "empty":
            return TransferError(f"publisher at {where} has published nothing yet")
        return TransferError(f"publisher at {where} refused the ticket: {reason}")


def _line(stream: io.BufferedReader[Any], gone: str) -> dict[str, Any]:
    line = stream.readline(_LINE_LIMIT)
    if not line.endswith(b"\n"):
        raise PublisherGone(f"{gone} (connection ended)")
    found: dict[str, Any] = json.loads(line)
    return found


def _read_into(stream: io.BufferedReader[Any], target: memoryview, gone: str) -> None:
    done = 0
    while done < len(target):
        n = stream.readinto(target[done:])
        if not n:
            raise PublisherGone(f"{gone} (connection ended after {done} of {len(target)} bytes)")
        done += n
