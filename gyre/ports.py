"""TCP ports and addresses of this machine."""

from __future__ import annotations

import hmac
import ipaddress
import socket

LOOPBACK = "127.0.0.1"
"""Where what nobody else is to reach listens."""


def is_loopback(host: str) -> bool:
    """Whether other machines cannot reach `host`. A name is looked up nowhere: it counts as one they reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def free_port(host: str = LOOPBACK) -> int:
    """A TCP port that nothing listened on a moment ago."""
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


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
