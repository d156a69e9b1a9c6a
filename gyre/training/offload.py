"""A trainer's tensors out of its device's memory, and back in the same places.

A storage is emptied and filled again: parameters, Megatron's flat buffers and whatever else looks into it stay the
objects that they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class NoRoomError(RuntimeError):
    """There is no memory for the tensors to come back to, or to go to. All are where they were."""


class Offload:
    """Holds the tensors that `tensors` names, while they are out, in host memory (pinned, where they are of CUDA)."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._host: list[tuple[Tensor, Tensor]] = []
        """Each storage as uint8, and its bytes."""
        self.is_out = False

    def out(self) -> int:
        """Copy them to the host and free their memory; bytes freed. Idempotent. Raises NoRoomError."""
        if self.is_out:
            return 0
        storages = {t.untyped_storage().data_ptr(): t for t in self._tensors() if t.untyped_storage().nbytes()}
        for tensor in storages.values():
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            try:
                host = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=tensor.is_cuda)
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                nbytes = sum(t.untyped_storage().nbytes() for t in storages.values())
                self.back()
                raise NoRoomError(
                    f"{nbytes / 1e9:.2f} GB of the trainer do not fit into the host's memory while its cell serves: "
                    f"give the machine more, or split the trainer further (cells.layout); {_first_line(error)}"
                ) from error
            host.copy_(whole)
            whole.untyped_storage().resize_(0)
            self._host.append((whole, host))
        self.is_out = True
        if any(whole.is_cuda for whole, _ in self._host):
            torch.cuda.empty_cache()  # else torch keeps what the server beside it needs
        return sum(host.nbytes for _, host in self._host)

    def back(self) -> None:
        """Take the memory again, and fill it. Idempotent. Raises NoRoomError."""
        try:
            for whole, host in self._host:
                whole.untyped_storage().resize_(host.nbytes)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            for whole, _ in self._host:
                whole.untyped_storage().resize_(0)
            nbytes, device = sum(host.nbytes for _, host in self._host), self._host[0][0].device
            raise NoRoomError(
                f"{nbytes / 1e9:.2f} GB of the trainer do not fit on {device} beside its cell's server: lower "
                f"cells.serving.memory_fraction, or split the trainer further (cells.layout); {_first_line(error)}"
            ) from error
        for whole, host in self._host:
            whole.copy_(host)
        self._host.clear()
        self.is_out = False

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Within, they are in place; afterwards they are out again if they were before."""
        was_out = self.is_out
        self.back()
        try:
            yield
        finally:
            if was_out:
                self.out()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
