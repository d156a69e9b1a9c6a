"""A frozen reference policy for the KL penalty: the weights a trainer began with, in the place of the trained ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gyre.training.model import Policy


class FrozenReference:
    """A copy of the policy's weights as they are now; this rank's part of them."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._weights = {name: p.detach().clone() for name, p in policy.model.named_parameters()}

    def tensors(self) -> list[torch.Tensor]:
        """What it holds in memory."""
        return list(self._weights.values())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the policy computes with the frozen weights; forward only. No tensor is copied."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        with torch.no_grad():
            for name, parameter in self._policy.model.named_parameters():
                parameter.data, self._weights[name] = self._weights[name], parameter.data
