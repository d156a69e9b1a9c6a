"""A Qwen3 small enough to start, serve and train in a test; random weights, no tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
    "use_cache": True,
    "use_sliding_window": False,
}


def make_weights(seed: int) -> dict[str, torch.Tensor]:
    """Weights by Hugging Face name, float32, wide enough that two seeds give plainly different log-probs."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * 0.08

    v, h, f = CONFIG["vocab_size"], CONFIG["hidden_size"], CONFIG["intermediate_size"]
    q, kv, d = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["head_dim"]
    weights = {
        "model.embed_tokens.weight": normal(v, h),
        "lm_head.weight": normal(v, h),
        "model.norm.weight": torch.ones(h),
    }
    for i in range(CONFIG["num_hidden_layers"]):
        p = f"model.layers.{i}."
        weights |= {
            p + "self_attn.q_proj.weight": normal(q * d, h),
            p + "self_attn.k_proj.weight": normal(kv * d, h),
            p + "self_attn.v_proj.weight": normal(kv * d, h),
            p + "self_attn.o_proj.weight": normal(h, q * d),
            p + "self_attn.q_norm.weight": torch.ones(d),
            p + "self_attn.k_norm.weight": torch.ones(d),
            p + "mlp.gate_proj.weight": normal(f, h),
            p + "mlp.up_proj.weight": normal(f, h),
            p + "mlp.down_proj.weight": normal(h, f),
            p + "input_layernorm.weight": torch.ones(h),
            p + "post_attention_layernorm.weight": torch.ones(h),
        }
    return weights


def write_policy(folder: Path, seed: int) -> Path:
    """A checkpoint folder as Hugging Face writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1), encoding="utf-8")
    save_file(make_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
