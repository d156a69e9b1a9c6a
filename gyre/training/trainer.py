"""One training replica: weights, gradient accumulator, optimizer. No sockets, no database."""

from __future__ import annotations

import ctypes
import gc
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gyre.config import ObjectiveConfig, TrainerConfig
from gyre.objective import Targets, policy_loss, target_weight
from gyre.training.batch import PackedBatch, check_whole_rollouts
from gyre.training.checkpoint import CheckpointError, CheckpointMeta, read_meta, read_optimizer, save_checkpoint
from gyre.training.logprobs import TargetQuery
from gyre.training.metrics import MicroBatchMetrics, measure
from gyre.training.model import Policy, load_policy
from gyre.training.streaming import NonFiniteError, StreamingStep
from gyre.training.weights import read_hf_weights


@dataclass(frozen=True)
class StepResult:
    """An optimizer step that was taken. `grad_norm` is of the step's gradient before clipping."""

    version: int
    grad_norm: float
    lr: float


class Trainer:
    """Loads a policy, accumulates gradients of micro-batches, takes optimizer steps.

    The accumulator holds the gradient of R times the step's loss, in float32, so that accumulators of several replicas
    add up; `optimizer_step(R)` divides once.
    """

    def __init__(self, policy: Path, settings: TrainerConfig, objective: ObjectiveConfig, *, seed: int = 0) -> None:
        self.folder = policy
        self.settings = settings
        self.objective = objective
        self.seed = seed
        self.policy: Policy = load_policy(policy, recompute=settings.recompute, seed=seed)
        self.stream = StreamingStep(self.policy, settings.optimizer)
        self.stream.begin()
        self.version: int | None = None
        self.asleep = False

    def load(self, version: int, source: Path | Mapping[str, Tensor]) -> None:
        """Take weights, and the optimizer's state where the source has one, as `version`; empties the accumulator.

        `source`: a checkpoint or policy folder, or tensors by Hugging Face's names. Without an optimizer's state
        (version 0, or a replica that never steps) it starts fresh. Raises CheckpointError or WeightsError, before
        anything changes, for a source that does not fit.
        """
        state = None
        if isinstance(source, Path):
            meta = read_meta(source)
            if meta is not None and meta.version != version:
                raise CheckpointError(f"{source}: holds version {meta.version}, not {version}")
            if meta is not None:
                state = read_optimizer(source)
            source = read_hf_weights(source)
        self.policy.load_hf(source)
        self.stream = StreamingStep(self.policy, self.settings.optimizer)
        if state is not None:
            self.stream.optimizer.load_state_dict(state)
        self.stream.begin()
        self.version = version

    def begin(self) -> None:
        """Empty the accumulator."""
        self.stream.begin()

    def micro_batch(self, batch: PackedBatch, name: str) -> MicroBatchMetrics:
        """Add the gradient of a micro-batch. `name` is how errors call it.

        Raises NonFiniteError (nothing was added, or the accumulator must be emptied if the gradient it now holds is
        not finite), BatchError for samples that the objective cannot use.
        """
        started = time.perf_counter()
        if self.objective.whole_rollouts:
            check_whole_rollouts(batch.samples)
        device = self.policy.device
        query = TargetQuery(
            positions=torch.from_numpy(batch.positions).to(device),
            temperatures=torch.from_numpy(batch.temperatures).to(device),
            predictors=torch.from_numpy(batch.predictors).to(device),
            ids=torch.from_numpy(batch.target_ids).to(device),
            chunk=self.settings.logprob_chunk,
        )
        targets = self._targets(batch, device)
        ids = torch.from_numpy(batch.ids).to(device)
        apart = sum(s.n_tokens for s in batch.samples)

        def forward(policy: Policy) -> tuple[Tensor, MicroBatchMetrics]:
            logprobs, entropies = policy.target_logprobs(batch.row, ids, query)
            result = policy_loss(logprobs, targets, self.objective)
            metrics = measure(result, logprobs, targets.behaviour, entropies, tokens=len(ids), branch_tokens=apart)
            if not math.isfinite(metrics.abs_difference_sum):
                # A ratio of zero would hide it: the loss stays finite.
                raise NonFiniteError("log-probs of trainer or sampler are not finite")
            return result.loss, metrics

        try:
            metrics = self.stream.micro_batch(forward)
            self.stream.check_finite()
        except NonFiniteError as error:
            rollouts = sorted({s.rollout_id for s in batch.samples})
            raise NonFiniteError(
                f"{name}: {error}; it was refused. Rollouts: {', '.join(rollouts[:4])}"
                + (f" and {len(rollouts) - 4} more" if len(rollouts) > 4 else "")
            ) from error
        metrics.seconds = time.perf_counter() - started
        return metrics

    def _targets(self, batch: PackedBatch, device: torch.device) -> Targets:
        unit, firsts = torch.from_numpy(batch.sample), list(batch.samples)
        if self.objective.ratio == "rollout":
            names = [s.rollout_id for s in batch.samples]
            units = list(dict.fromkeys(names))
            unit = torch.tensor([units.index(n) for n in names])[unit]
            firsts = [batch.samples[names.index(u)] for u in units]
        return Targets(
            behaviour=torch.from_numpy(batch.behaviour).to(device),
            sequence=unit.to(device),
            advantage=torch.tensor([s.advantage for s in firsts], device=device),
            weight=torch.tensor([target_weight(self.objective, s.rollout_targets) for s in firsts], device=device),
        )

    def gradient(self) -> Tensor:
        """A copy of the accumulator: one flat float32 tensor on the CPU, in an order that all replicas share."""
        return torch.cat([b.reshape(-1) for b in self.stream.buffers()]).cpu()

    def checked_gradient(self, gradient: Tensor) -> Tensor:
        """`gradient` if it can be absorbed. Raises ValueError for another size or dtype, NonFiniteError."""
        size = sum(b.numel() for b in self.stream.buffers())
        if gradient.shape != (size,) or gradient.dtype != torch.float32:
            raise ValueError(f"gradient: expected float32 [{size}], got {gradient.dtype} {list(gradient.shape)}")
        if not gradient.isfinite().all():
            raise NonFiniteError("the gradient to absorb is not finite; it was refused")
        return gradient

    def absorb(self, gradient: Tensor) -> None:
        """Add another replica's `gradient()`. Raises as `checked_gradient`, and nothing is added."""
        self.checked_gradient(gradient)
        buffers = self.stream.buffers()
        for buffer, part in zip(buffers, torch.split(gradient, [b.numel() for b in buffers]), strict=True):
            buffer += part.view_as(buffer).to(buffer.device)

    def learning_rate(self) -> float:
        """Rate of the next step: linear from lr / (warmup_steps + 1), then constant."""
        optimizer = self.settings.optimizer
        return optimizer.lr * min(1.0, (self._loaded() + 1) / (optimizer.warmup_steps + 1))

    def optimizer_step(self, n_valid: int) -> StepResult:
        """Divide by R = `n_valid`, clip, step, empty the accumulator: the version rises by one.

        With `n_valid` = 0 no rollout gave a gradient: the weights stay and the version rises all the same. Raises
        NonFiniteError, before any weight changes.
        """
        rate, norm = self.learning_rate(), 0.0
        if n_valid > 0:
            norm = self.stream.finish(n_valid, rate)
        self.stream.begin()
        self.version = self._loaded() + 1
        return StepResult(self.version, norm, rate)

    def export_hf(self) -> dict[str, Tensor]:
        """A copy of the weights by Hugging Face's names, float32."""
        return self.policy.export_hf()

    def save(self, root: Path, run_id: str, step_id: int | None) -> Path:
        """Write the checkpoint of this version under `root`, atomically; its folder."""
        meta = CheckpointMeta(run_id, self._loaded(), step_id, self.seed)
        state: dict[str, Any] = self.stream.optimizer.state_dict()
        return save_checkpoint(root, meta, self.export_hf(), state, self.folder)

    def sleep(self) -> None:
        """Give back what training needs between micro-batches: freed activations, to the system or the device.

        Weights, accumulator and optimizer stay: a held gradient must survive a change of role.
        """
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        else:
            _trim()
        self.asleep = True

    def wake(self) -> None:
        """The opposite of `sleep`."""
        self.asleep = False

    def _loaded(self) -> int:
        if self.version is None:
            raise RuntimeError("no version is loaded")
        return self.version


def _trim() -> None:
    # glibc keeps freed memory; other C libraries have no such call and nothing to do.
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return
    trim(0)
