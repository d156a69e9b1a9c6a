"""Bytes between cells: weights out, gradients in. `open_publisher` and `open_puller` are the way in."""

from gyre.transfer.base import (
    CorruptTransfer,
    LappedTransfer,
    PublisherGone,
    StaleTicket,
    Ticket,
    TransferError,
    WeightPublisher,
    WeightPuller,
)
from gyre.transfer.choose import open_publisher, open_puller

__all__ = [
    "CorruptTransfer",
    "LappedTransfer",
    "PublisherGone",
    "StaleTicket",
    "Ticket",
    "TransferError",
    "WeightPublisher",
    "WeightPuller",
    "open_publisher",
    "open_puller",
]
