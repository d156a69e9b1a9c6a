"""Supervised training with the trainer's own model, packing and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gyre.config import OptimizerConfig
from gyre.training.logprobs import TargetLogprobs, TargetQuery
from gyre.training.model import Policy
from gyre.training.streaming import StreamingStep
from gyre.training.weights import write_hf_weights
from gyre.trajectory.packed import TreeRow


@dataclass(frozen=True)
class Example:
    """One sequence. `ids` int [n]; `mask` bool [n], true for tokens to learn (its first is never a target)."""

    ids: np.ndarray
    mask: np.ndarray


class SupervisedTrainer:
    """Minimises the mean negative log-likelihood of masked tokens.

    `policy` comes from `build_policy(shape)` or `load_policy(folder)`. A step's examples are packed into micro-batches
    of at most `micro_batch_tokens` tokens.
    """

    def __init__(
        self, policy: Policy, optimizer: OptimizerConfig, *, micro_batch_tokens: int = 8192, chunk: int = 1024
    ) -> None:
        self.policy = policy
        self.stream = StreamingStep(policy, optimizer)
        self.budget = micro_batch_tokens
        self.chunk = chunk

    def step(self, examples: Sequence[Example], lr: float | None = None) -> float:
        """One optimizer step on `examples`; the mean loss in nats a target. Raises ValueError without targets."""
        count = sum(int(e.mask[1:].sum()) for e in examples)
        if not count:
            raise ValueError("no token is to be learnt: every mask is empty")
        total = self.accumulate(examples)
        self.stream.finish(count, lr)
        return total / count

    def accumulate(self, examples: Sequence[Example]) -> float:
        """The gradient of the sum of their losses, into an accumulator that was emptied; that sum."""
        self.stream.begin()
        return sum(self.stream.micro_batch(*self._work(part)) for part in _packs(examples, self.budget))

    def evaluate(self, examples: Sequence[Example]) -> float:
        """Mean loss in nats a target, without training."""
        count = sum(int(e.mask[1:].sum()) for e in examples)
        return sum(self.stream.micro_batch(*self._work(p), train=False) for p in _packs(examples, self.budget)) / count

    def export(self, folder: Path) -> None:
        """Write the weights as `folder`/model.safetensors; config.json and tokenizer files are the caller's."""
        folder.mkdir(parents=True, exist_ok=True)
        write_hf_weights(self.policy.export_hf(), folder)

    def _work(
        self, examples: Sequence[Example]
    ) -> tuple[Callable[[Policy], TargetLogprobs], Callable[[TargetLogprobs], tuple[Tensor, float]]]:
        row, laid, mask = self._lay(examples)
        ids = torch.from_numpy(laid.astype(np.int64))
        targets = torch.from_numpy(np.flatnonzero(mask))
        query = TargetQuery(
            positions=targets - 1,
            temperatures=torch.ones(len(targets)),
            predictors=torch.arange(len(targets)),
            ids=ids[targets],
            chunk=self.chunk,
        )

        def loss(found: TargetLogprobs) -> tuple[Tensor, float]:
            value = -found.logprobs.sum()
            return value, value.item()

        return lambda policy: policy.target_logprobs(row, ids, query), loss

    def _lay(self, examples: Sequence[Example]) -> tuple[TreeRow, NDArray[np.integer], NDArray[np.bool_]]:
        """The examples as a row: its shape, its ids [T], and which of its tokens are targets, bool [T]."""
        mask = np.concatenate([np.concatenate([[False], e.mask[1:].astype(bool)]) for e in examples])
        return TreeRow.sequences([len(e.ids) for e in examples]), np.concatenate([e.ids for e in examples]), mask


def _packs(examples: Sequence[Example], budget: int) -> list[list[Example]]:
    packs: list[list[Example]] = []
    size = budget + 1
    for example in examples:
        if size + len(example.ids) > budget:
            packs.append([])
            size = 0
        packs[-1].append(example)
        size += len(example.ids)
    return [p for p in packs if any(e.mask[1:].any() for e in p)]
