"""Log-probs of chosen tokens from the decoder's hidden states, a chunk of positions at a time.

The vocabulary's logits exist for one chunk only, forward and backward. Backward needs a chunk's softmax: those of the
last chunks are kept from the forward pass, up to a fixed size, and what does not fit is computed again. So memory does
not grow with positions x vocabulary without bound, and positions that are no targets cost nothing.
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

_KEPT_BYTES = 512 << 20
"""What softmaxes kept for the backward pass may take; the last chunk's is kept whatever its size. One that is not kept
costs a fourth product with the vocabulary instead of three."""

_CACHED = 1 << 16
"""Logits that are worked on at once on a CPU."""


class TargetLogprobs(NamedTuple):
    """Log-probs [N] (differentiable) and entropies [N] (not), in nats, at the temperature asked for."""

    logprobs: Tensor
    entropies: Tensor


@dataclass(frozen=True)
class TargetQuery:
    """Which tokens' log-probs are wanted.

    `positions` int64 [P] are row positions of the tokens that predict, each once; `temperatures` [P]. Target n is token
    `ids[n]`, predicted by `positions[predictors[n]]`: at a fork one token predicts the first of every child.
    `predictors` int64 [N] ascends, and `ids` is int64 [N].
    """

    positions: Tensor
    temperatures: Tensor
    predictors: Tensor
    ids: Tensor
    chunk: int = 1024

    def process(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        vocab: int | None = None,
        **_: object,
    ) -> TargetLogprobs:
        """Megatron's `output_processor` hook: hidden states [T, 1, H] to log-probs of the targets. `vocab` as below."""
        weight = output_layer.weight if output_weight is None else output_weight
        hidden = hidden_states[:, 0].index_select(0, self.positions)
        # softmax(h W / T) = softmax((h / T) W)
        hidden = hidden / self.temperatures.to(hidden.dtype)[:, None]
        return token_logprobs(
            hidden, weight, self.ids, self.chunk, output_layer.tp_group, predictors=self.predictors, vocab=vocab
        )


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    chunk: int,
    group: dist.ProcessGroup | None = None,
    *,
    predictors: Tensor | None = None,
    vocab: int | None = None,
) -> TargetLogprobs:
    """log softmax(hidden @ weight.T)[predictors[n], ids[n]] for hidden [P, H], weight [V, H], ids int64 [N]; and the
    entropies of those distributions, [N].

    `predictors` int64 [N] must ascend; None: row n predicts target n. Logits exist for `chunk` rows of `hidden` at
    once. With a tensor-parallel `group` of several ranks, `weight` is this rank's equal slice of the vocabulary, and
    rows beyond token `vocab` - 1 (which fill the last slice up) are no tokens. The slices' logits are never gathered:
    what the ranks exchange is a maximum and two sums a row, and a number a target.
    """
    if group is not None and group.size() > 1:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        start = group.rank() * weight.size(0)
        tokens = weight.size(0) if vocab is None else min(weight.size(0), vocab - start)
    else:
        group, start, tokens = None, 0, weight.size(0)
    if predictors is None:
        predictors = torch.arange(len(ids), device=ids.device)
    logprobs, entropies = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, ids, predictors, chunk, group, start, tokens
    )
    return TargetLogprobs(logprobs, entropies)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        predictors: Tensor,
        chunk: int,
        group: dist.ProcessGroup | None,
        start: int,
        tokens: int,
    ) -> tuple[Tensor, Tensor]:
        local, mine = _local_ids(ids, start, tokens)
        table = weight[:tokens]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logsumexp, entropies = (torch.empty(len(hidden), dtype=wide, device=hidden.device) for _ in range(2))
        logprobs = torch.empty(len(ids), dtype=wide, device=hidden.device)
        parts = _parts(len(hidden), chunk, predictors)
        kept: dict[int, Tensor] = {}
        keep_from = _kept_from(parts, tokens * wide.itemsize) if any(ctx.needs_input_grad) else len(parts)
        for index, (rows, part) in enumerate(parts):
            logits = (hidden[rows] @ table.t()).to(wide)
            at = predictors[part] - rows.start
            chosen = logits[at, local[part]].mul_(mine[part])
            top = logits.amax(1)
            _reduce(top, dist.ReduceOp.MAX, group)
            total, weighted = _exponentials(logits.sub_(top[:, None]))
            _reduce(torch.stack([total, weighted]), dist.ReduceOp.SUM, group, (total, weighted))
            _reduce(chosen, dist.ReduceOp.SUM, group)
            log_total = total.log()
            logsumexp[rows] = top + log_total
            entropies[rows] = log_total - weighted / total
            logprobs[part] = chosen - logsumexp[rows][at]
            if index >= keep_from:
                kept[index] = logits.div_(total[:, None])
        ctx.save_for_backward(hidden, weight, local, mine, predictors, logsumexp)
        ctx.parts, ctx.kept, ctx.tokens = parts, kept, tokens
        entropies = entropies[predictors]
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, mine, predictors, logsumexp = ctx.saved_tensors
        grad = grads[0]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        table, grad_table = weight[: ctx.tokens], grad_weight[: ctx.tokens]
        for index, (rows, part) in reversed(list(enumerate(ctx.parts))):
            states, g = hidden[rows], grad[part]
            at = predictors[part] - rows.start
            # d logp = onehot - softmax, summed over the targets of a row
            summed = torch.zeros(len(states), dtype=g.dtype, device=g.device).index_add_(0, at, g)
            softmax = ctx.kept.pop(index, None)
            if softmax is None:
                softmax = (states @ table.t()).to(logsumexp.dtype).sub_(logsumexp[rows, None]).exp_()
            d = softmax.mul_(-summed[:, None])
            d.index_put_((at, local[part]), g * mine[part], accumulate=True)
            d = d.to(hidden.dtype)
            grad_hidden[rows] = d @ table
            grad_table.addmm_(d.t(), states)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _exponentials(logits: Tensor) -> tuple[Tensor, Tensor]:
    """e^x in the place of x [n, V]; sums over V of e^x and of x e^x, each [n]. A few rows at a time on a CPU, so that
    what passes write and read again stays in the cache."""
    total, weighted = (logits.new_empty(len(logits)) for _ in range(2))
    rows = max(1, _CACHED // logits.size(1)) if logits.device.type == "cpu" else max(1, len(logits))
    for start in range(0, len(logits), rows):
        part = slice(start, start + rows)
        powers = logits[part].exp()
        torch.sum(powers, 1, out=total[part])
        torch.linalg.vecdot(powers, logits[part], out=weighted[part])
        logits[part] = powers
    return total, weighted


def _parts(n: int, chunk: int, predictors: Tensor) -> list[tuple[slice, slice]]:
    """Slices of at most `chunk` of n rows, and beside each the slice of the targets that they predict."""
    bounds = [*range(0, n, chunk), n]
    cuts = torch.searchsorted(predictors, torch.tensor(bounds, device=predictors.device)).tolist()
    return [(slice(bounds[i], bounds[i + 1]), slice(cuts[i], cuts[i + 1])) for i in range(len(bounds) - 1)]


def _kept_from(parts: list[tuple[slice, slice]], row_bytes: int) -> int:
    """The first of the last chunks whose softmaxes take at most `_KEPT_BYTES` together; at least the last is one."""
    first, held = len(parts), 0
    while first and (first == len(parts) or held + _rows(parts[first - 1]) * row_bytes <= _KEPT_BYTES):
        first -= 1
        held += _rows(parts[first]) * row_bytes
    return first


def _rows(part: tuple[slice, slice]) -> int:
    rows: int = part[0].stop - part[0].start
    return rows


def _local_ids(ids: Tensor, start: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Ids inside this rank's slice of the vocabulary (0 where they are not), and 1 or 0 by whether they are."""
    shifted = ids - start
    mine = (shifted >= 0) & (shifted < tokens)
    return shifted.where(mine, torch.zeros_like(shifted)), mine


def _reduce(
    value: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None, into: tuple[Tensor, ...] = ()
) -> None:
    if group is None:
        return
    dist.all_reduce(value, op=op, group=group)
    for target, part in zip(into, value, strict=False):
        target.copy_(part)
