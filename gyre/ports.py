"""TCP ports and addresses of this machine."""

from __future__ import annotations

import hmac
import ipaddress
import random
import socket

LOOPBACK = "127.0.0.1"
"""Where what nobody else is to reach listens."""


def is_loopback(host: str) -> bool:
    """Whether other machines cannot reach `host`. A name is looked up nowhere: it counts as one they reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


EPHEMERAL = 32768
"""Where Linux's range of ephemeral ports begins. What listens stays below: there, an outgoing connection of anybody
could take its port before it listens, or while it is being restarted."""

_RANGE = range(30000, EPHEMERAL)  # those from 20000 are the stack's, which keeps its ports


def can_listen(host: str, port: int) -> bool:
    """Whether a server could listen on this port of `host` now: it is an address of this machine, and nobody does."""
    with socket.socket() as probe:
        # As servers do: connections in TIME_WAIT from a run before do not make a port taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(host: str = LOOPBACK) -> int:
    """A TCP port of `host` that nothing listens on, at any address. Raises OSError where there is none."""
    for port in random.sample(_RANGE, k=200):
        if can_listen("0.0.0.0", port) and can_listen(host, port):
            return port
    raise OSError(f"no free port between {_RANGE.start} and {_RANGE.stop} of {host}; is it this machine's address?")


LOST_S = 25
"""Seconds of a network that carries nothing after which a connection counts as lost (`notice_loss`)."""


def notice_loss(connection: socket.socket) -> None:
    """Have reads and writes of `connection` fail once the other side is gone without a word: its machine ended, or
    what lies between drops packets. A side that is there and only takes its time is waited for."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause, questions = LOST_S // 5, 4
    for option, value in (
        (socket.TCP_KEEPIDLE, pause), (socket.TCP_KEEPINTVL, pause), (socket.TCP_KEEPCNT, questions),
        (socket.TCP_USER_TIMEOUT, LOST_S * 1000),  # of what was sent and is not acknowledged: else some 15 minutes
    ):  # fmt: skip
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def is_token(said: object, token: str) -> bool:
    """Whether what a stranger said is the token, whatever letters it has; takes as long whichever of them differ."""
    return hmac.compare_digest(str(said).encode("utf-8", "surrogatepass"), token.encode())
