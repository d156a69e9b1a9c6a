"""Which backend moves the bytes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Literal

import torch

from gyre.ports import LOOPBACK
from gyre.transfer.base import Backend, Ticket, WeightPublisher, WeightPuller

log = logging.getLogger(__name__)


def open_publisher(
    params: Mapping[str, torch.Tensor],
    backend: Literal["auto", "mooncake", "socket"] = "auto",
    host: str = LOOPBACK,
) -> WeightPublisher:
    """A publisher of `params` (contiguous CPU tensors of any dtype, read at each publish), reachable at `host`.

    `auto`: see `choose`. Raises TransferError: the backend asked for is not available.
    """
    chosen = choose(host) if backend == "auto" else backend
    if chosen == "socket":
        from gyre.transfer.sockets import SocketPublisher

        return SocketPublisher(params, host)
    from gyre.transfer.mooncake import MooncakePublisher

    return MooncakePublisher(params, host)


def open_puller(ticket: Ticket, host: str = LOOPBACK) -> WeightPuller:
    """A puller for `ticket`, by the backend that made it; `host`: of this machine, which Mooncake answers at.

    Raises TransferError where that backend is not available here.
    """
    if ticket.backend == "socket":
        from gyre.transfer.sockets import SocketPuller

        return SocketPuller(ticket)
    from gyre.transfer.mooncake import MooncakePuller

    return MooncakePuller(ticket, host)


@cache
def choose(host: str) -> Backend:
    """The backend that `auto` means in this process; logged once.

    Mooncake where there is RDMA, which is what it is for. Over TCP plain sockets were faster than it at each size that
    `python -m benchmarks.transfer` measures (docs/architecture.md, "Weights and gradients on the move").
    """
    from gyre.transfer.mooncake import MooncakeUnavailable, engine, rdma_devices

    if not (devices := rdma_devices()):
        log.info("transfer: plain sockets (no RDMA device)")
        return "socket"
    try:
        engine(host)
    except MooncakeUnavailable as reason:
        log.warning("transfer: plain sockets (%s)", reason)
        return "socket"
    log.info("transfer: Mooncake Transfer Engine, RDMA by %s", ", ".join(devices))
    return "mooncake"
