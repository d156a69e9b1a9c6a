"""TCP ports and addresses of this machine."""

from __future__ import annotations

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
