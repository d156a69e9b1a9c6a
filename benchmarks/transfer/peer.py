"""The publishing process: `python -m benchmarks.transfer.peer BACKEND BYTES`.

Prints a JSON line: the ticket, and the port of a raw server, which sends the published slot's bytes to whoever
connects. Then publishes once for every line on stdin, and prints the seconds that took. Ends with its stdin.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

import torch

from gyre.transfer import open_publisher
from gyre.transfer.base import Slots

TENSOR = 4 << 20
"""Bytes of one tensor."""


def main() -> None:
    backend, nbytes = sys.argv[1], int(sys.argv[2])
    block = torch.randn(TENSOR // 4)
    # The same block under many names: a slot holds them all, so what is copied, summed and sent is of full size.
    params = {f"w{i}": block for i in range(nbytes // TENSOR)}
    publisher = open_publisher(params, backend)  # type: ignore[arg-type]
    ticket = publisher.publish(0)
    publisher.publish(1)  # both slots have been written: from here on no memory is fresh
    slots: Slots = publisher._slots  # type: ignore[attr-defined]
    raw = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(raw, slots.buffers[0]), daemon=True).start()
    print(json.dumps([ticket.to_json(), raw.getsockname()[1]]), flush=True)
    for version, _ in enumerate(sys.stdin, 2):
        began = time.perf_counter()
        publisher.publish(version)
        print(time.perf_counter() - began, flush=True)


def serve(server: socket.socket, buffer: torch.Tensor) -> None:
    data = buffer.numpy().data
    while True:
        connection, _ = server.accept()
        with connection:
            connection.sendall(data)


if __name__ == "__main__":
    main()
