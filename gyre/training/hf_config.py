"""The shape of a policy and of its tensors, read from a Hugging Face `config.json`: Llama, Qwen2 and dense Qwen3."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3")


class UnsupportedModelError(Exception):
    """A checkpoint that the trainer cannot train exactly; the message is one line and names the field."""


@dataclass(frozen=True)
class ModelShape:
    """Everything that decides a dense decoder's arithmetic."""

    family: str
    """`llama`, `qwen2` or `qwen3`."""
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied: bool
    """Input embedding and output layer are one matrix."""

    @property
    def qkv_bias(self) -> bool:
        """Biases on the query, key and value projections."""
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """RMS norms on each query and key head."""
        return self.family == "qwen3"


def read_shape(folder: Path) -> ModelShape:
    """Shape of the checkpoint in `folder`. Raises UnsupportedModelError, naming the file and field."""
    path = folder / "config.json"
    if not path.is_file():
        raise UnsupportedModelError(f"{path}: no such file; a policy is a folder in Hugging Face's format")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UnsupportedModelError(f"{path}: not valid JSON: {error}") from error
    return shape_from_dict(data, str(path))


def shape_from_dict(data: Mapping[str, Any], where: str = "config") -> ModelShape:
    """Shape from a config as a mapping (`PretrainedConfig.to_dict()` or config.json); `where` names it in errors."""

    def need(field: str) -> Any:
        if data.get(field) is None:
            raise UnsupportedModelError(f"{where}: {field}: required field is missing")
        return data[field]

    def refuse(field: str, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{where}: {field} = {data.get(field)!r}: {why}")

    family = need("model_type")
    if family not in FAMILIES:
        raise refuse("model_type", f"not supported; supported are {', '.join(FAMILIES)}")
    if data.get("hidden_act", "silu") != "silu":
        raise refuse("hidden_act", "only 'silu' is supported")
    for field in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if data.get(field):
            raise refuse(field, "not supported; only false is")
    heads = int(need("num_attention_heads"))
    hidden = int(need("hidden_size"))
    kv_heads = data.get("num_key_value_heads")
    return ModelShape(
        family=family,
        layers=int(need("num_hidden_layers")),
        hidden=hidden,
        ffn=int(need("intermediate_size")),
        heads=heads,
        kv_heads=int(heads if kv_heads is None else kv_heads),
        head_dim=int(data.get("head_dim") or hidden // heads),
        vocab=int(need("vocab_size")),
        max_positions=int(data.get("max_position_embeddings") or 2048),
        norm_eps=float(need("rms_norm_eps")),
        rope_theta=_rope_theta(data, where),
        tied=bool(data.get("tie_word_embeddings", False)),
    )


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and size of every tensor of a Hugging Face checkpoint of this shape."""
    h, f, d = shape.hidden, shape.ffn, shape.head_dim
    q, kv = shape.heads * d, shape.kv_heads * d
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, h), "model.norm.weight": (h,)}
    if not shape.tied:
        sizes["lm_head.weight"] = (shape.vocab, h)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (q, h),
        "self_attn.k_proj.weight": (kv, h),
        "self_attn.v_proj.weight": (kv, h),
        "self_attn.o_proj.weight": (h, q),
        "mlp.gate_proj.weight": (f, h),
        "mlp.up_proj.weight": (f, h),
        "mlp.down_proj.weight": (h, f),
    }
    if shape.qkv_bias:
        layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if shape.qk_norm:
        layer |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
    for i in range(shape.layers):
        sizes |= {f"model.layers.{i}.{name}": size for name, size in layer.items()}
    return sizes


def check_layout(shape: ModelShape, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Raise UnsupportedModelError where a model of this shape cannot be split so; the message names the field."""
    for name, size in (
        ("num_attention_heads", shape.heads),
        ("num_key_value_heads", shape.kv_heads),
        ("intermediate_size", shape.ffn),
    ):
        if size % tensor_parallel:
            raise UnsupportedModelError(
                f"layout.tensor_parallel = {tensor_parallel}: must divide the policy's {name}, {size}"
            )
    if shape.vocab <= (tensor_parallel - 1) * vocab_rows(shape, tensor_parallel):
        raise UnsupportedModelError(
            f"layout.tensor_parallel = {tensor_parallel}: the vocabulary of {shape.vocab} is too small to be split so"
        )
    if shape.layers % pipeline_parallel:
        raise UnsupportedModelError(
            f"layout.pipeline_parallel = {pipeline_parallel}: must divide the policy's num_hidden_layers, "
            f"{shape.layers}"
        )


def vocab_rows(shape: ModelShape, tensor_parallel: int) -> int:
    """Rows of the vocabulary on each of so many ranks; the last one's are filled up."""
    return -(-shape.vocab // tensor_parallel)


def _rope_theta(data: Mapping[str, Any], where: str) -> float:
    # transformers 5 writes rope_parameters; earlier versions rope_theta and rope_scaling.
    parameters = data.get("rope_parameters") or {}
    scaling = data.get("rope_scaling") or {}
    for name, rope in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise UnsupportedModelError(f"{where}: {name}.rope_type = {kind!r}: only 'default' is supported")
    return float(parameters.get("rope_theta", data.get("rope_theta") or 10000.0))
