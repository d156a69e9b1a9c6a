"""Weights between Hugging Face's names and Megatron-Core's `GPTModel` (local spec), whole or one rank's part of them.

Both directions only rename, split and join: a round trip is bit-equal, through any layout. Gradients and the
optimizer's moments convert like weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gyre.training.hf_config import ModelShape, hf_shapes
from gyre.training.shards import EMBEDDING, WHOLE, Shard, local_shape

_PLAIN = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_QK_NORM = {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}


class WeightsError(Exception):
    """Tensors that do not fit the model; the message is one line and names the tensor."""


def check_weights(weights: Mapping[str, Tensor], shape: ModelShape) -> None:
    """Raise WeightsError for a missing, unknown or wrongly shaped tensor of a whole Hugging Face checkpoint."""
    wanted = hf_shapes(shape)
    # A tied checkpoint may or may not repeat the matrix under the output layer's name.
    spare = {"lm_head.weight"} if shape.tied else set()
    for name, size in wanted.items():
        if name not in weights:
            raise WeightsError(f"tensor {name} is missing from the checkpoint")
        if tuple(weights[name].shape) != size:
            raise WeightsError(f"tensor {name} has shape {tuple(weights[name].shape)}, expected {size}")
    unknown = sorted(n for n in set(weights) - set(wanted) - spare if not n.endswith("rotary_emb.inv_freq"))
    if unknown:
        raise WeightsError(f"tensor {unknown[0]} is not part of this model" + _more(unknown))


def hf_to_megatron(weights: Mapping[str, Tensor], shape: ModelShape, shard: Shard = WHOLE) -> dict[str, Tensor]:
    """Megatron's state from Hugging Face's; of one rank, from what `split_hf` gave. Raises WeightsError for whole
    tensors that do not fit."""
    if shard == WHOLE:
        check_weights(weights, shape)
    local = local_shape(shape, shard)
    out = {}
    if shard.first:
        out["embedding.word_embeddings.weight"] = weights[EMBEDDING]
    if shard.last:
        out["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
        if not shape.tied:
            out["output_layer.weight"] = weights["lm_head.weight"]
        elif not shard.first:
            out["output_layer.weight"] = weights[EMBEDDING]
    per_group = shape.heads // shape.kv_heads
    for here, i in enumerate(shard.layers(shape)):
        hf, mc = f"model.layers.{i}.", f"decoder.layers.{here}."
        for ours, theirs in _renames(shape).items():
            out[mc + ours] = weights[hf + theirs]
        out[mc + "mlp.linear_fc1.weight"] = torch.cat(
            [weights[hf + "mlp.gate_proj.weight"], weights[hf + "mlp.up_proj.weight"]]
        )
        for suffix in ("weight", "bias") if shape.qkv_bias else ("weight",):
            q, k, v = (
                _heads(weights[f"{hf}self_attn.{x}_proj.{suffix}"], local.kv_heads, rows * shape.head_dim)
                for x, rows in (("q", per_group), ("k", 1), ("v", 1))
            )
            out[f"{mc}self_attention.linear_qkv.{suffix}"] = torch.cat([q, k, v], 1).flatten(0, 1)
    return out


def megatron_to_hf(weights: Mapping[str, Tensor], shape: ModelShape, shard: Shard = WHOLE) -> dict[str, Tensor]:
    """Hugging Face's state from Megatron's; of one rank, what `join_hf` takes. Tied models have no `lm_head.weight`,
    as in their checkpoints. Raises WeightsError for a missing tensor."""

    def get(name: str) -> Tensor:
        if name not in weights:
            raise WeightsError(f"tensor {name} is missing from the Megatron model")
        return weights[name]

    local = local_shape(shape, shard)
    out = {}
    if shard.first:
        out[EMBEDDING] = get("embedding.word_embeddings.weight")
    if shard.last:
        out["model.norm.weight"] = get("decoder.final_layernorm.weight")
        if not shape.tied:
            out["lm_head.weight"] = get("output_layer.weight")
        elif not shard.first:
            out[EMBEDDING] = get("output_layer.weight")
    d = shape.head_dim
    q_rows = shape.heads // shape.kv_heads * d
    for here, i in enumerate(shard.layers(shape)):
        hf, mc = f"model.layers.{i}.", f"decoder.layers.{here}."
        for ours, theirs in _renames(shape).items():
            out[hf + theirs] = get(mc + ours)
        gate, up = get(mc + "mlp.linear_fc1.weight").chunk(2)
        out[hf + "mlp.gate_proj.weight"], out[hf + "mlp.up_proj.weight"] = gate, up
        for suffix in ("weight", "bias") if shape.qkv_bias else ("weight",):
            qkv = _heads(get(f"{mc}self_attention.linear_qkv.{suffix}"), local.kv_heads, q_rows + 2 * d)
            for x, part in zip("qkv", torch.split(qkv, [q_rows, d, d], 1), strict=True):
                out[f"{hf}self_attn.{x}_proj.{suffix}"] = part.flatten(0, 1)
    return out


def _heads(x: Tensor, groups: int, rows: int) -> Tensor:
    """[groups * rows, ...] to [groups, rows, ...]."""
    return x.reshape(groups, rows, *x.shape[1:])


def _renames(shape: ModelShape) -> dict[str, str]:
    return _PLAIN | _QK_NORM if shape.qk_norm else _PLAIN


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
