"""A paced trainer: Gyre's own trainer process and ledger, with a sleep where the model would compute.

python -m benchmarks.elastic.trainer --cell NAME --socket PATH      (as workers.trainer)
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from benchmarks.elastic.costs import read_costs
from gyre.config import CellConfig
from gyre.simulation.model import CostModel
from gyre.training.batch import PackedBatch
from gyre.training.checkpoint import CheckpointMeta, save_checkpoint
from gyre.training.metrics import MicroBatchMetrics
from gyre.training.outcome import StepResult
from workers import trainer
from workers.settings import WorkerSettings

if TYPE_CHECKING:
    from gyre.training.trainer import Trainer

SIZE = 4
"""Numbers of the weights and of the gradient: enough to be moved, summed and checked."""


class PacedTrainer:
    """What `gyre.training.replica.Replica` asks of a `Trainer`. A micro-batch adds its number of tokens to the
    gradient, so that a step's gradient is the number of tokens that it trained, exactly once each."""

    def __init__(self, cost: CostModel, policy: Path) -> None:
        self.cost, self.folder = cost, policy
        self.version: int | None = None
        self.asleep = False
        self.weights = torch.zeros(SIZE)
        self.sum = torch.zeros(SIZE)

    def load(self, version: int, source: Path | Mapping[str, Tensor]) -> None:
        self.version = version
        self.begin()

    def begin(self) -> None:
        self.sum = torch.zeros(SIZE)

    def micro_batch(self, batch: PackedBatch, name: str) -> MicroBatchMetrics:
        tokens = len(batch.ids)
        seconds = tokens / self.cost.train_tokens_s
        time.sleep(seconds)
        self.sum += tokens
        return MicroBatchMetrics(
            tokens=tokens,
            branch_tokens=sum(s.n_tokens for s in batch.samples),
            n_targets=len(batch.target_ids),
            seconds=seconds,
        )

    def gradient(self) -> Tensor:
        return self.sum.clone()

    def checked_gradient(self, gradient: Tensor) -> Tensor:
        return gradient

    def absorb(self, gradient: Tensor | None) -> None:
        assert gradient is not None
        self.sum += gradient

    def optimizer_step(self, divisor: int) -> StepResult:
        time.sleep(self.cost.optimizer_s)
        result = StepResult((self.version or 0) + 1, float(self.sum[0]), 0.0)
        self.version = result.version
        self.begin()
        return result

    def export_hf(self) -> dict[str, Tensor]:
        return {"paced": self.weights.clone()}

    def save(self, root: Path, run_id: str, step_id: int | None) -> Path:
        meta = CheckpointMeta(run_id, self.version or 0, step_id, 0)
        no_optimizer: dict[str, Any] = {}
        return save_checkpoint(root, meta, self.export_hf(), no_optimizer, self.folder)

    def sleep(self) -> None:
        """Half of what a change to serving takes; see `engine.PacedEngine.resume`."""
        if not self.asleep:
            time.sleep(self.cost.to_rollout_s / 2)
        self.asleep = True

    def wake(self) -> None:
        """Half of what a change to training takes."""
        if self.asleep:
            time.sleep(self.cost.to_train_s / 2)
        self.asleep = False


def make_trainer(settings: WorkerSettings, cell: CellConfig) -> Trainer:
    """For `workers.trainer`."""
    return cast("Trainer", PacedTrainer(read_costs(settings.data), settings.run.policy.path))


if __name__ == "__main__":
    trainer.main(make_trainer)
