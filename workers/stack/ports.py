"""Ports of the stack: chosen once, kept in stack.json, so that URLs handed out stay valid over restarts."""

from __future__ import annotations

import random

from gyre.ports import LOOPBACK, can_listen, is_loopback

NAMES = ("postgres", "temporal", "ui", "temporal_http", "temporal_metrics", "gateway")


def gateway_names(count: int) -> list[str]:
    """Names of the gateway's processes, and of their ports: gateway, gateway-1, …"""
    return ["gateway", *(f"gateway-{i}" for i in range(1, count))]


_RANGE = range(20000, 30000)  # below the ephemeral ones, as in gyre.ports


class PortError(Exception):
    """A port that the run file asks for cannot be had; the message is one line."""


def choose_ports(
    wanted: dict[str, int], kept: dict[str, int], *, gateways: int = 1, listen: str = LOOPBACK
) -> tuple[dict[str, int], list[str]]:
    """Ports by name: the one `wanted` (nonzero), else the one `kept` from before if free, else any free one.

    Free is one at 127.0.0.1 and, where `listen` is another, at every address.

    Returns the ports and the names of kept ports that had to change. Raises PortError where a wanted one is taken, or
    `listen` is no address of this machine.
    """
    if not is_free(0, listen):
        raise PortError(f"stack.listen: {listen} is no address of this machine; `ip address` shows them")
    chosen: dict[str, int] = {}
    changed: list[str] = []
    for name in (*NAMES, *gateway_names(gateways)[1:]):
        want, keep = wanted.get(name, 0), kept.get(name, 0)
        if want:
            if want in chosen.values() or not is_free(want, listen):
                raise PortError(f"stack.{name}_port: port {want} is in use; choose another one, or 0 for any free one")
            chosen[name] = want
        elif keep and keep not in chosen.values() and is_free(keep, listen):
            chosen[name] = keep
        else:
            chosen[name] = _any_free(set(chosen.values()) | set(wanted.values()) | set(kept.values()), listen)
            if keep:
                changed.append(name)
    return chosen, changed


def is_free(port: int, listen: str = LOOPBACK) -> bool:
    """Whether a server could listen on this port of 127.0.0.1 now; beyond it, at every address: Temporal does."""
    hosts = {LOOPBACK, listen} | (set() if is_loopback(listen) else {"0.0.0.0"})
    return all(can_listen(host, port) for host in hosts)


def _any_free(taken: set[int], listen: str) -> int:
    for port in random.sample(_RANGE, k=200):
        if port not in taken and is_free(port, listen):
            return port
    raise PortError(f"no free port between {_RANGE.start} and {_RANGE.stop}; end what uses them")
