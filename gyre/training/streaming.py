"""Megatron's own forward-backward schedules, as work comes in, and one optimizer step when the caller says so.

Micro-batches come when their rollouts are ready; their number is not known before. Each adds its gradient, unscaled, to
Megatron's float32 buffers; what the sum is divided by is given once, at the end.

With several ranks every method is called on all of them, with the same arguments, and gives or raises the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from gyre.config import OptimizerConfig
from gyre.training import megatron_cpu, parallel
from gyre.training.model import Policy
from gyre.training.outcome import NonFiniteError

megatron_cpu.install()

from megatron.core.distributed import finalize_model_grads  # noqa: E402
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig  # noqa: E402
from megatron.core.optimizer import get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

Output = TypeVar("Output")
Logs = TypeVar("Logs")


class StreamingStep:
    """The accumulator and optimizer of one policy."""

    def __init__(self, policy: Policy, optimizer: OptimizerConfig) -> None:
        self.policy = policy
        self.settings = optimizer
        self.optimizer: Any = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=optimizer.lr,
                adam_beta1=optimizer.beta1,
                adam_beta2=optimizer.beta2,
                adam_eps=optimizer.eps,
                weight_decay=optimizer.weight_decay,
                clip_grad=optimizer.clip_grad,
                params_dtype=policy.dtype,
                bf16=policy.dtype == torch.bfloat16,
            ),
            [policy.ddp],
        )
        self._schedule = get_forward_backward_func()

    def begin(self) -> None:
        """Forget what was accumulated."""
        self.policy.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def micro_batch(
        self, forward: Callable[[Policy], Output], loss: Callable[[Output], tuple[Tensor, Logs]], *, train: bool = True
    ) -> Logs:
        """Run forward and backward of one micro-batch and add its gradient; without `train` the forward pass only.

        `forward(policy)` gives the model's output; `loss` makes of it the scalar to add and what to return from here,
        on the last pipeline stage only. Raises NonFiniteError for a loss that is not finite, or where `loss` does;
        nothing is added then (with several pipeline stages, the accumulator is to be emptied).
        """
        [logs] = self.micro_batches([(forward, loss)], train=train)
        return logs

    def micro_batches(
        self,
        work: Sequence[tuple[Callable[[Policy], Output], Callable[[Output], tuple[Tensor, Logs]]]],
        *,
        train: bool = True,
    ) -> list[Logs]:
        """`micro_batch` for several at once: pipeline stages then work on different ones at the same time.

        One at a time, only one of P stages works; with n at once, n of n + P - 1 turns are used. Where one raises, the
        accumulator is to be emptied.
        """
        failed: list[NonFiniteError] = []

        def step(data: Any, model: Any) -> tuple[Any, Callable[[Any], tuple[Tensor, Tensor, Logs | None]]]:
            forward, loss = next(data)
            return forward(self.policy), lambda output: scalar(output, loss)

        def scalar(output: Any, loss: Callable[[Any], tuple[Tensor, Logs]]) -> tuple[Tensor, Tensor, Logs | None]:
            logs: Logs | None = None
            try:
                value, logs = loss(output)
                if not math.isfinite(value.item()):
                    raise NonFiniteError(f"the loss is {value.item()}")
            except NonFiniteError as error:
                if self.policy.shard.pp == 1:  # every rank has the same loss, and raises here
                    raise
                # The other stages wait for a gradient: they get zeros, and the error afterwards.
                failed.append(error)
                value = self.policy.received().sum() * 0.0
            # Megatron sums the second part over micro-batches for its own divisor; ours comes in `finish`.
            return value, torch.zeros([], dtype=torch.int, device=value.device), logs

        config = self.policy.config
        config.finalize_model_grads_func, config.no_sync_func = lambda *a, **k: None, nullcontext
        with self.policy.ddp.no_sync(), torch.set_grad_enabled(train):
            logs = self._schedule(
                forward_step_func=step,
                data_iterator=iter(work),
                model=[self.policy.ddp],
                num_microbatches=len(work),
                seq_length=1,  # shapes are told from stage to stage
                micro_batch_size=1,
                forward_only=not train,
            )
        if self.policy.shard.pp > 1:
            logs, failed = parallel.broadcast_from_last_stage((logs, failed))
            if failed:
                raise failed[0]
        return list(logs)

    def buffers(self) -> list[Tensor]:
        """The flat float32 tensors that gradients accumulate in (views: writing to them changes the accumulator)."""
        return [b.grad_data for b in (*self.policy.ddp.buffers, *self.policy.ddp.expert_parallel_buffers)]

    def finish(self, divisor: int, lr: float | None = None) -> float:
        """Divide the accumulated gradient by `divisor`, clip it, take one Adam step; its norm before clipping.

        `lr` replaces the settings' rate for this step. Raises NonFiniteError, before any weight changes, for a
        gradient that is not finite.
        """
        self.check_finite()
        count = torch.tensor(divisor, dtype=torch.int, device=self.policy.device)
        finalize_model_grads([self.policy.ddp], count)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr if lr is None else lr
        done, norm, _ = self.optimizer.step()
        if not done:
            raise NonFiniteError("Megatron's optimizer skipped the step")
        return float(norm if norm is not None else self.optimizer.get_grad_norm())

    def check_finite(self) -> None:
        """Raise NonFiniteError if the accumulated gradient is not finite everywhere."""
        bad = 0
        for buffer in self.buffers():
            # One pass at the speed of memory: whatever is not finite makes the sum so, and a sum of finite float32 that
            # overflows is as unusable.
            if not math.isfinite(buffer.sum().item()):
                bad += max(1, int((~buffer.isfinite()).sum()))
        if bad := parallel.total(bad):
            raise NonFiniteError(f"the accumulated gradient has {bad} non-finite values")
