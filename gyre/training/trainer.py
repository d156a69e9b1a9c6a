"""One training replica: weights, gradient accumulator, optimizer. No sockets, no database.

With a layout of several ranks each has a `Trainer`, and every method is called on all of them (`gyre.training.ranks`).
"""

from __future__ import annotations

import ctypes
import gc
import math
import time
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from gyre.config import LayoutConfig, ObjectiveConfig, TrainerConfig
from gyre.objective import Targets, policy_loss, target_weight
from gyre.training import parallel
from gyre.training.batch import PackedBatch, check_whole_rollouts
from gyre.training.checkpoint import CheckpointError, CheckpointMeta, read_meta, read_optimizer, save_checkpoint
from gyre.training.convert import check_weights
from gyre.training.hf_config import hf_shapes
from gyre.training.logprobs import TargetLogprobs, TargetQuery
from gyre.training.metrics import MicroBatchMetrics, combine, measure
from gyre.training.model import Policy, load_policy
from gyre.training.offload import Offload
from gyre.training.optimizer_state import export_state, import_state, state_tensors
from gyre.training.outcome import NonFiniteError, StepResult
from gyre.training.pipeline import cut
from gyre.training.reference import FrozenReference
from gyre.training.streaming import StreamingStep
from gyre.training.weights import read_hf_weights

Forward = Callable[[Policy], TargetLogprobs]


P = ParamSpec("P")
Result = TypeVar("Result")


def _resident(method: Callable[Concatenate[Trainer, P], Result]) -> Callable[Concatenate[Trainer, P], Result]:
    """The trainer's tensors are on its device for as long as `method` runs."""

    @wraps(method)
    def inside(self: Trainer, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        with self.offload.resident():
            return method(self, *args, **kwargs)

    return inside


class Trainer:
    """Loads a policy, accumulates gradients of micro-batches, takes optimizer steps.

    The accumulator holds the gradient of the step's loss times its divisor D (`gyre.objective.loss`), in float32, so
    that accumulators of several replicas add up; `optimizer_step(D)` divides once.
    """

    def __init__(
        self,
        policy: Path,
        settings: TrainerConfig,
        objective: ObjectiveConfig,
        *,
        seed: int = 0,
        layout: LayoutConfig | None = None,
    ) -> None:
        self.folder = policy
        self.settings = settings
        self.objective = objective
        self.seed = seed
        self.policy: Policy = load_policy(policy, recompute=settings.recompute, seed=seed, layout=layout)
        self.stream = StreamingStep(self.policy, settings.optimizer)
        self.stream.begin()
        self.version: int | None = None
        self.asleep = False
        # Before `load`: what is in the policy now are the run's first weights.
        frozen = objective.kl != "none" and objective.kl_reference == "initial"
        self.reference = FrozenReference(self.policy) if frozen else None
        self.offload = Offload(self._tensors)

    def load(self, version: int, source: Path | Mapping[str, Tensor]) -> None:
        """Take weights, and the optimizer's state where the source has one, as `version`; empties the accumulator.

        `source`: a checkpoint or policy folder, or tensors by Hugging Face's names. Without an optimizer's state
        (version 0, or a replica that never steps) it starts fresh. Raises CheckpointError or WeightsError, before
        anything changes, for a source that does not fit.
        """
        self.take(version, *self.read(version, source))

    def read(
        self, version: int, source: Path | Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor], dict[str, Any] | None]:
        """What `load` takes, weights and optimizer state: all that can fail, and rank 0 alone does it. Raises as
        `load`."""
        state = None
        if isinstance(source, Path):
            meta = read_meta(source)
            if meta is not None and meta.version != version:
                raise CheckpointError(f"{source}: holds version {meta.version}, not {version}")
            if meta is not None:
                state = read_optimizer(source)
            source = read_hf_weights(source)
        check_weights(source, self.policy.shape)
        return source, state

    @_resident
    def take(self, version: int, weights: Mapping[str, Tensor] | None, state: dict[str, Any] | None) -> None:
        """The rest of `load`. With several ranks, rank 0 gives what it read, the others None."""
        self.policy.load_hf(weights)
        self.stream = StreamingStep(self.policy, self.settings.optimizer)
        if parallel.broadcast(state is not None):
            import_state(self.policy, self.stream.optimizer, state)
        self.stream.begin()
        self.version = version

    @_resident
    def begin(self) -> None:
        """Empty the accumulator."""
        self.stream.begin()

    @_resident
    def micro_batch(self, batch: PackedBatch, name: str) -> MicroBatchMetrics:
        """Add the gradient of a micro-batch. `name` is how errors call it.

        Raises NonFiniteError (nothing was added, or the accumulator must be emptied if the gradient it now holds is
        not finite), BatchError for samples that the objective cannot use.
        """
        started = time.perf_counter()
        if self.objective.whole_rollouts:
            check_whole_rollouts(batch.samples)
        stages = self.policy.shard.pp
        parts = [batch] if stages == 1 else cut(batch, 2 * stages, whole_rollouts=self.objective.ratio == "rollout")
        try:
            measured = self.stream.micro_batches([self._work(part) for part in parts])
            self.stream.check_finite()
        except NonFiniteError as error:
            rollouts = sorted({s.rollout_id for s in batch.samples})
            raise NonFiniteError(
                f"{name}: {error}; it was refused. Rollouts: {', '.join(rollouts[:4])}"
                + (f" and {len(rollouts) - 4} more" if len(rollouts) > 4 else "")
            ) from error
        metrics = combine(measured)
        metrics.rejected_by_node = {node: n for part in measured for node, n in part.rejected_by_node.items()}
        metrics.seconds = time.perf_counter() - started
        return metrics

    def _work(self, batch: PackedBatch) -> tuple[Forward, Callable[[TargetLogprobs], tuple[Tensor, MicroBatchMetrics]]]:
        """Forward pass and loss of one row."""
        device = self.policy.device
        query = TargetQuery(
            positions=torch.from_numpy(batch.positions).to(device),
            temperatures=torch.from_numpy(batch.temperatures).to(device),
            predictors=torch.from_numpy(batch.predictors).to(device),
            ids=torch.from_numpy(batch.target_ids).to(device),
            chunk=self.settings.logprob_chunk,
        )
        ids = torch.from_numpy(batch.ids).to(device)
        apart = sum(s.n_tokens for s in batch.samples)

        def forward(policy: Policy) -> TargetLogprobs:
            return policy.target_logprobs(batch.row, ids, query)

        targets = self._targets(batch, device, self._reference_logprobs(forward))

        def loss(found: TargetLogprobs) -> tuple[Tensor, MicroBatchMetrics]:
            logprobs, entropies = found
            result = policy_loss(logprobs, targets, self.objective)
            metrics = measure(
                result,
                logprobs,
                targets.behaviour,
                entropies,
                tokens=len(ids),
                branch_tokens=apart,
                nodes=batch.nodes,
            )
            if not math.isfinite(metrics.abs_difference_sum):
                # A ratio of zero would hide it: the loss stays finite.
                raise NonFiniteError("log-probs of trainer or sampler are not finite")
            return result.loss, metrics

        return forward, loss

    def _reference_logprobs(self, forward: Forward) -> Tensor | None:
        """Log-probs [N] of the targets under the frozen reference policy, where the objective has one."""

        def read(found: TargetLogprobs) -> tuple[Tensor, Tensor]:
            return found.logprobs.sum(), found.logprobs.detach().cpu()  # it may go to other ranks

        if self.reference is None:
            return None
        with self.reference.in_place():
            return self.stream.micro_batch(forward, read, train=False)

    def _targets(self, batch: PackedBatch, device: torch.device, reference: Tensor | None) -> Targets:
        unit, firsts = torch.from_numpy(batch.sample), list(batch.samples)
        if self.objective.ratio == "rollout":
            names = [s.rollout_id for s in batch.samples]
            units = list(dict.fromkeys(names))
            unit = torch.tensor([units.index(n) for n in names])[unit]
            firsts = [batch.samples[names.index(u)] for u in units]
        weights = [target_weight(self.objective, s.rollout_targets) for s in firsts]
        return Targets(
            behaviour=torch.from_numpy(batch.behaviour).to(device),
            sequence=unit.to(device),
            advantage=torch.tensor([s.advantage for s in firsts], dtype=torch.float64).to(device),
            weight=torch.tensor(weights, dtype=torch.float64).to(device),
            reference=None if reference is None else reference.to(device),
        )

    @_resident
    def gradient(self) -> Tensor:
        """A copy of the accumulator: one flat float32 tensor on the CPU, tensors in the order of `hf_shapes`.

        Replicas share that order whatever their layouts. With several ranks, rank 0 has it and the others nothing.
        """
        main = {name: p.main_grad for name, p in self.policy.model.named_parameters()}
        whole = self.policy.to_hf(main, sums=True)
        flat = [whole[name].reshape(-1) for name in hf_shapes(self.policy.shape)] if whole else [torch.empty(0)]
        return torch.cat(flat).cpu()

    def checked_gradient(self, gradient: Tensor) -> Tensor:
        """`gradient` if it can be absorbed. Raises ValueError for another size or dtype, NonFiniteError."""
        size = sum(map(math.prod, hf_shapes(self.policy.shape).values()))
        if gradient.shape != (size,) or gradient.dtype != torch.float32:
            raise ValueError(f"gradient: expected float32 [{size}], got {gradient.dtype} {list(gradient.shape)}")
        if not gradient.isfinite().all():
            raise NonFiniteError("the gradient to absorb is not finite; it was refused")
        return gradient

    @_resident
    def absorb(self, gradient: Tensor | None) -> None:
        """Add another replica's `gradient()`; rank 0 gives it. Raises as `checked_gradient`, and nothing is added."""
        whole = None
        if gradient is not None:
            sizes = hf_shapes(self.policy.shape)
            parts = torch.split(self.checked_gradient(gradient), [math.prod(size) for size in sizes.values()])
            whole = {name: part.view(size) for (name, size), part in zip(sizes.items(), parts, strict=True)}
        added = self.policy.from_hf(whole, sums=True)
        for name, parameter in self.policy.model.named_parameters():
            parameter.main_grad += added[name].to(parameter.device)

    def learning_rate(self) -> float:
        """Rate of the next step: linear from lr / (warmup_steps + 1), then constant."""
        optimizer = self.settings.optimizer
        return optimizer.lr * min(1.0, (self._loaded() + 1) / (optimizer.warmup_steps + 1))

    @_resident
    def optimizer_step(self, divisor: int) -> StepResult:
        """Divide by D = `divisor`, clip, step, empty the accumulator: the version rises by one.

        With 0 no rollout gave a gradient: the weights stay and the version rises all the same. Raises
        NonFiniteError, before any weight changes.
        """
        rate, norm = self.learning_rate(), 0.0
        if divisor > 0:
            norm = self.stream.finish(divisor, rate)
        self.stream.begin()
        self.version = self._loaded() + 1
        return StepResult(self.version, norm, rate)

    @_resident
    def export_hf(self) -> dict[str, Tensor]:
        """A copy of the weights by Hugging Face's names, float32; with several ranks, rank 0 has it."""
        return self.policy.export_hf()

    @_resident
    def export_optimizer(self) -> dict[str, Any]:
        """A copy of the optimizer's state (`gyre.training.optimizer_state`); with several ranks, rank 0 has it."""
        return export_state(self.policy, self.stream.optimizer)

    def save(self, root: Path, run_id: str, step_id: int | None) -> Path:
        """Write the checkpoint of this version under `root`, atomically; its folder. It names no layout."""
        return self.write(root, run_id, step_id, self.export_hf(), self.export_optimizer())

    def write(
        self, root: Path, run_id: str, step_id: int | None, weights: Mapping[str, Tensor], state: dict[str, Any]
    ) -> Path:
        """The part of `save` that rank 0 does alone."""
        meta = CheckpointMeta(run_id, self._loaded(), step_id, self.seed)
        return save_checkpoint(root, meta, weights, state, self.folder)

    def sleep(self) -> None:
        """Give memory back while the cell serves. On CUDA all that training holds there goes to the host, and comes in
        again for as long as a call needs it (an `absorb` on a central that serves). On a CPU only freed activations go
        back to the system: weights, accumulator and optimizer stay, since a held gradient survives a change of role.
        """
        gc.collect()
        if self.policy.device.type == "cuda":
            self.offload.out()
            torch.cuda.empty_cache()
        else:
            _trim()
        self.asleep = True

    def wake(self) -> None:
        """The opposite of `sleep`."""
        self.offload.back()
        self.asleep = False

    def _tensors(self) -> list[Tensor]:
        """What training holds on the device between two micro-batches."""
        frozen = [] if self.reference is None else self.reference.tensors()
        moments = state_tensors(self.policy, self.stream.optimizer)
        return [*self.policy.model.parameters(), *self.stream.buffers(), *moments, *frozen]

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
