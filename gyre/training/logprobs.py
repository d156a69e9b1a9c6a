"""Log-probs of chosen tokens from the decoder's hidden states, a chunk of positions at a time.

The vocabulary's logits exist for one chunk only, forward and backward (where they are computed again): memory does not
grow with positions x vocabulary, and positions that are no targets cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gyre.training import megatron_cpu

megatron_cpu.install()

from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region  # noqa: E402


class TargetLogprobs(NamedTuple):
    """Log-probs [N] (differentiable) and entropies [N] (not), in nats, at the temperature asked for."""

    logprobs: Tensor
    entropies: Tensor


@dataclass(frozen=True)
class TargetQuery:
    """Which tokens' log-probs are wanted. Target n is token `ids[n]`, predicted at row position `positions[n]`.

    `positions` int64 [N] are positions of the *predicting* token: one before the target's own. `temperatures` [N].
    """

    positions: Tensor
    ids: Tensor
    temperatures: Tensor
    chunk: int = 1024

    def process(
        self, *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: object
    ) -> TargetLogprobs:
        """Megatron's `output_processor` hook: hidden states [T, 1, H] to log-probs of the targets."""
        weight = output_layer.weight if output_weight is None else output_weight
        hidden = hidden_states[:, 0].index_select(0, self.positions)
        # softmax(h W / T) = softmax((h / T) W)
        hidden = hidden / self.temperatures.to(hidden.dtype)[:, None]
        return token_logprobs(hidden, weight, self.ids, self.chunk, output_layer.tp_group)


def token_logprobs(
    hidden: Tensor, weight: Tensor, ids: Tensor, chunk: int, group: dist.ProcessGroup | None = None
) -> TargetLogprobs:
    """log softmax(hidden @ weight.T)[n, ids[n]] for hidden [N, H], weight [V, H], ids int64 [N]; and entropies.

    With a tensor-parallel `group` of several ranks, `weight` is this rank's equal slice of the vocabulary.
    """
    if group is not None and group.size() > 1:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
    else:
        group = None
    logprobs, entropies = _TokenLogprobs.apply(hidden, weight, ids, chunk, group)  # type: ignore[no-untyped-call]
    return TargetLogprobs(logprobs, entropies)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, chunk: int, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        local, mine = _local_ids(ids, weight.size(0), group)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logsumexp, logprobs, entropies = (torch.empty(len(ids), dtype=wide, device=hidden.device) for _ in range(3))
        for part in _parts(len(ids), chunk):
            logits = (hidden[part] @ weight.t()).to(wide)
            chosen = logits.gather(1, local[part, None]).squeeze(1).mul_(mine[part])
            top = logits.amax(1)
            _reduce(top, dist.ReduceOp.MAX, group)
            logits.sub_(top[:, None])
            powers = logits.exp()
            total = powers.sum(1)
            weighted = torch.linalg.vecdot(powers, logits)
            _reduce(torch.stack([total, weighted, chosen]), dist.ReduceOp.SUM, group, (total, weighted, chosen))
            log_total = total.log()
            logsumexp[part] = top + log_total
            logprobs[part] = chosen - logsumexp[part]
            entropies[part] = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, local, mine, logsumexp)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, mine, logsumexp = ctx.saved_tensors
        grad = grads[0]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        for part in _parts(len(local), ctx.chunk):
            rows, g = hidden[part], grad[part]
            logits = (rows @ weight.t()).to(logsumexp.dtype)
            # d logp = onehot - softmax
            d = logits.sub_(logsumexp[part, None]).exp_().mul_(-g[:, None])
            d.scatter_add_(1, local[part, None], (g * mine[part])[:, None])
            d = d.to(hidden.dtype)
            grad_hidden[part] = d @ weight
            grad_weight.addmm_(d.t(), rows)
        return grad_hidden, grad_weight, None, None, None


def _parts(n: int, chunk: int) -> list[slice]:
    return [slice(i, min(i + chunk, n)) for i in range(0, n, chunk)]


def _local_ids(ids: Tensor, vocab: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Ids inside this rank's slice of the vocabulary (0 where they are not), and 1 or 0 by whether they are."""
    if group is None:
        return ids, torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    shifted = ids - group.rank() * vocab
    mine = (shifted >= 0) & (shifted < vocab)
    return shifted.where(mine, torch.zeros_like(shifted)), mine


def _reduce(
    value: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None, into: tuple[Tensor, ...] = ()
) -> None:
    if group is None:
        return
    dist.all_reduce(value, op=op, group=group)
    for target, part in zip(into, value, strict=False):
        target.copy_(part)
