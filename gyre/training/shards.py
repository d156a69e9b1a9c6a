"""Parts of a model: what each rank of a tensor- and pipeline-parallel trainer holds, by Hugging Face's names.

Every tensor of a checkpoint is cut along one dimension or none (tensor parallel), and its layer lies on one pipeline
stage. So a rank's part is a smaller model of the same kind: `local_shape`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gyre.training.hf_config import ModelShape, hf_shapes, vocab_rows

EMBEDDING = "model.embed_tokens.weight"
_SPLIT_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_SPLIT_COLUMNS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Shard:
    """Which part of a model a rank holds: tensor-parallel rank `tp_rank` of `tp`, pipeline stage `pp_rank` of `pp`."""

    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0

    @property
    def first(self) -> bool:
        """Holds the input embedding."""
        return self.pp_rank == 0

    @property
    def last(self) -> bool:
        """Holds the final norm and the output layer (a copy of the embedding where the two are tied)."""
        return self.pp_rank == self.pp - 1

    def layers(self, shape: ModelShape) -> range:
        """Numbers of the layers that lie here."""
        count = shape.layers // self.pp
        return range(self.pp_rank * count, (self.pp_rank + 1) * count)


WHOLE = Shard()


def padded_vocab(shape: ModelShape, tensor_parallel: int) -> int:
    """Rows of Megatron's embedding over all ranks: the last rank's are filled up with zeros, which are no tokens."""
    return vocab_rows(shape, tensor_parallel) * tensor_parallel


def local_shape(shape: ModelShape, shard: Shard) -> ModelShape:
    """The shape of one rank's part, as if it were a model: fewer heads, a narrower ffn, fewer rows of vocabulary."""
    if shard.tp == 1:
        return shape
    return dataclasses.replace(
        shape,
        heads=shape.heads // shard.tp,
        kv_heads=shape.kv_heads // shard.tp,
        ffn=shape.ffn // shard.tp,
        vocab=vocab_rows(shape, shard.tp),
    )


def split_hf(
    weights: Mapping[str, Tensor], shape: ModelShape, shard: Shard, *, sums: bool = False
) -> dict[str, Tensor]:
    """The part of whole tensors by Hugging Face's names that `shard` holds: views, where nothing has to be filled up.

    A tensor that several ranks hold goes to each of them; with `sums` (gradients that are not reduced yet) one
    whose gradient is the sum of its ranks' goes to one of them, and zeros to the others.
    """
    out = {}
    for name, sizes in part_shapes(shape, shard).items():
        tensor = weights[name]
        if sums and _is_partial(name, shape) and not _is_owner(name, shape, shard):
            tensor = torch.zeros_like(tensor)
        dimension = _split_dimension(name)
        if shard.tp > 1 and dimension is not None:
            size = sizes[dimension]
            start = size * shard.tp_rank
            held = tensor.narrow(dimension, start, min(size, tensor.size(dimension) - start))
            if held.size(dimension) < size:
                held = torch.cat([held, held.new_zeros(size - held.size(0), *held.shape[1:])])
            tensor = held
        out[name] = tensor
    return out


def join_hf(
    parts: Iterable[tuple[Shard, Mapping[str, Tensor]]], shape: ModelShape, *, sums: bool = False
) -> dict[str, Tensor]:
    """Whole tensors from every rank's part: the opposite of `split_hf`. Reads `parts` once, in any order.

    Of a tensor that several ranks hold one is taken; with `sums`, where each rank's gradient is a part, all are added.
    """
    sizes = hf_shapes(shape)
    out: dict[str, Tensor] = {}
    for shard, held in parts:
        for name, part in held.items():
            if name not in out:
                out[name] = torch.zeros(sizes[name], dtype=part.dtype)
            dimension = _split_dimension(name)
            whole = out[name]
            if shard.tp > 1 and dimension is not None:
                start = part.size(dimension) * shard.tp_rank
                whole = whole.narrow(dimension, start, min(part.size(dimension), whole.size(dimension) - start))
                part = part.narrow(dimension, 0, whole.size(dimension))
            if sums and _is_partial(name, shape):
                whole += part
            elif _is_owner(name, shape, shard):
                whole.copy_(part)
    return {name: out[name] for name in sizes}


def part_shapes(shape: ModelShape, shard: Shard) -> dict[str, tuple[int, ...]]:
    """Name and size of every tensor of one rank's part, as `split_hf` makes and `join_hf` takes it."""
    sizes = hf_shapes(local_shape(shape, shard))
    return {name: sizes[name] for name in _names(shape, shard)}


def _names(shape: ModelShape, shard: Shard) -> list[str]:
    """Hugging Face's names of the tensors of which `shard` holds a part."""
    layers = {f"model.layers.{i}." for i in shard.layers(shape)}
    held = []
    for name in hf_shapes(shape):
        if name.startswith("model.layers."):
            here = name[: name.index(".", len("model.layers.")) + 1] in layers
        elif name == EMBEDDING:
            here = shard.first or (shard.last and shape.tied)
        else:
            here = shard.last
        if here:
            held.append(name)
    return held


def _split_dimension(name: str) -> int | None:
    """Along which dimension tensor parallelism splits a tensor; None: every rank holds all of it."""
    module = name.split(".")[-2]
    return 0 if module in _SPLIT_ROWS else 1 if module in _SPLIT_COLUMNS else None


def _is_partial(name: str, shape: ModelShape) -> bool:
    """Whether ranks that hold the same tensor see different parts of its gradient.

    Norms on heads see their rank's heads only; a tied matrix is the embedding at one end of the pipeline, and the
    output layer at the other. All else that is held twice has the same gradient everywhere.
    """
    return name.split(".")[-2] in ("q_norm", "k_norm") or (name == EMBEDDING and shape.tied)


def _is_owner(name: str, shape: ModelShape, shard: Shard) -> bool:
    """Whether `shard` is the one that speaks for a tensor, of those that hold the same part of it."""
    if name == EMBEDDING and not shard.first:
        return False
    return shard.tp_rank == 0 or _split_dimension(name) is not None
