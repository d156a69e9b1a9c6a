"""A connection that breaks: a proxy in front of a publisher which cuts, spoils or silences what it sends."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from typing import Literal, NamedTuple

from gyre.transfer import Ticket


class Cut(NamedTuple):
    """What happens to the publisher's bytes after the first `after` of them."""

    how: Literal["close", "spoil", "silence"]
    after: int


def through(ticket: Ticket, cut: Cut) -> Ticket:
    """The ticket of the same publisher by way of a proxy that serves one pull and lives as long as this process."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, _, port = ticket.address.rpartition(":")
    threading.Thread(target=_serve, args=(listener, (host, int(port)), cut), daemon=True).start()
    return dataclasses.replace(ticket, address=f"127.0.0.1:{listener.getsockname()[1]}")


def _serve(listener: socket.socket, target: tuple[str, int], cut: Cut) -> None:
    while True:
        puller, _ = listener.accept()
        publisher = socket.create_connection(target)
        threading.Thread(target=_pump, args=(puller, publisher), daemon=True).start()
        with contextlib.suppress(OSError):
            _answer(publisher, puller, cut)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)


def _answer(publisher: socket.socket, puller: socket.socket, cut: Cut) -> None:
    sent = 0
    while data := publisher.recv(4096):
        room = cut.after - sent
        if len(data) > room:
            if cut.how == "close":
                puller.sendall(data[:room])
                break
            if cut.how == "silence":
                puller.sendall(data[:room])
                threading.Event().wait()
            data = data[:room] + bytes([data[room] ^ 0x40]) + data[room + 1 :]
            cut = cut._replace(after=1 << 62)
        puller.sendall(data)
        sent += len(data)
    for one in (publisher, puller):
        one.shutdown(socket.SHUT_RDWR)
