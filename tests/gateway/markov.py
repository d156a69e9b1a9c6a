"""A real Qwen3 checkpoint whose next token depends on the last one by a table: a policy that can be scripted.

Attention and MLP write zeros into the residual stream, so the logits are a linear function of the last token's
embedding. Tokens of the table have one-hot embeddings, hence exact logits (float32); the others are noise.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
OPEN = '\n{"name": "bash", "arguments": {"command": "'
CLOSE = '"}}\n'
IDIOMS = [OPEN, CLOSE, "ls ", "cat ", "done"]
VOCAB = 320
HIDDEN = 64

# last token -> logits of the next; every other logit is 0. At temperature 1 an answer is a tool call (or two) with a
# command of some words, or a word of text. At temperature 0.05 the loop on "ls " never ends.
TABLE: dict[str, dict[str, float]] = {
    "\n": {"<tool_call>": 22.0, "done": 20.6},
    "<tool_call>": {OPEN: 25.0},
    OPEN: {"ls ": 22.0, "cat ": 21.5},
    "ls ": {"ls ": 21.0, CLOSE: 20.0},
    "cat ": {CLOSE: 22.0, "ls ": 22.0},
    CLOSE: {"</tool_call>": 25.0},
    "</tool_call>": {"<|im_end|>": 22.0, "<tool_call>": 20.5},
    "done": {"<|im_end|>": 25.0},
}


def tokenizer() -> Tokenizer:
    """Bytes, Qwen3's special tokens, and a few idioms as single tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(SPECIAL + alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    made.add_tokens([AddedToken(t, special=False) for t in MARKS + IDIOMS])
    assert made.get_vocab_size() <= VOCAB
    return made


def ids_of(table_token: str, made: Tokenizer) -> int:
    """The id of a token of the table."""
    ids = made.encode(table_token, add_special_tokens=False).ids
    assert len(ids) == 1, (table_token, ids)
    return int(ids[0])


def logits_after(token: int) -> np.ndarray:
    """The exact logits after a token of the table, float64[VOCAB]."""
    made = tokenizer()
    row = np.zeros(VOCAB)
    for last, nexts in TABLE.items():
        if ids_of(last, made) == token:
            for text, logit in nexts.items():
                row[ids_of(text, made)] = logit
            return row
    raise KeyError(token)


def write_policy(folder: Path) -> Path:
    """The checkpoint folder, as Hugging Face writes one."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizer()
    made.save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(0)
    embed = np.zeros((VOCAB, HIDDEN), np.float32)
    head = np.zeros((VOCAB, HIDDEN), np.float32)
    n = len(TABLE)
    embed[:, n:] = rng.normal(size=(VOCAB, HIDDEN - n)) * 0.2
    for dim, (last, nexts) in enumerate(TABLE.items()):
        embed[ids_of(last, made)] = 0
        embed[ids_of(last, made), dim] = 1
        for text, logit in nexts.items():
            head[ids_of(text, made), dim] = logit / np.sqrt(HIDDEN)  # the final norm scales to length sqrt(HIDDEN)
    head[:, n:] = rng.normal(size=(VOCAB, HIDDEN - n)) * 0.02
    heads, kv, d, ffn = 2, 1, 32, 32
    layer = "model.layers.0."
    save_file(
        {
            "model.embed_tokens.weight": embed,
            "lm_head.weight": head,
            "model.norm.weight": np.ones(HIDDEN, np.float32),
            layer + "self_attn.q_proj.weight": rng.normal(size=(heads * d, HIDDEN)).astype(np.float32) * 0.1,
            layer + "self_attn.k_proj.weight": rng.normal(size=(kv * d, HIDDEN)).astype(np.float32) * 0.1,
            layer + "self_attn.v_proj.weight": rng.normal(size=(kv * d, HIDDEN)).astype(np.float32) * 0.1,
            layer + "self_attn.o_proj.weight": np.zeros((HIDDEN, heads * d), np.float32),
            layer + "self_attn.q_norm.weight": np.ones(d, np.float32),
            layer + "self_attn.k_norm.weight": np.ones(d, np.float32),
            layer + "mlp.gate_proj.weight": np.zeros((ffn, HIDDEN), np.float32),
            layer + "mlp.up_proj.weight": np.zeros((ffn, HIDDEN), np.float32),
            layer + "mlp.down_proj.weight": np.zeros((HIDDEN, ffn), np.float32),
            layer + "input_layernorm.weight": np.ones(HIDDEN, np.float32),
            layer + "post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
        },
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": ffn,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": d,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-12,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
