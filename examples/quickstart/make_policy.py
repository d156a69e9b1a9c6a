"""Makes the quickstart's policy: ``python make_policy.py [folder]`` (a few minutes on one core).

Builds the tokenizer, then trains a three-layer Qwen3 from scratch, with Gyre's own trainer, to imitate the synthetic
transcripts: the assistant's tokens only, rendered as the gateway renders them. The transcripts mix right and flawed
ways, so the result is able but unreliable; making it reliable is what the run is for.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from pathlib import Path

import make_tasks
import make_tokenizer
import numpy as np
import torch
from dialogue import Templates, token_ids
from renderers.qwen3 import Qwen3Renderer
from torch import Tensor
from transcripts import transcript
from transformers import PreTrainedTokenizerFast

from gyre.config import OptimizerConfig
from gyre.training.hf_config import ModelShape, shape_from_dict
from gyre.training.model import build_policy
from gyre.training.sft import Example, SupervisedTrainer

SEED = 1000
STEPS, BATCH = 1200, 24
RATE, WARMUP, LAST = 2e-3, 50, 0.05

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "float32",
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "layer_types": ["full_attention"] * 3,
    "max_position_embeddings": 2048,
    "max_window_layers": 3,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
}


def fresh_weights(shape: ModelShape, seed: int) -> dict[str, Tensor]:
    """Random weights by Hugging Face's names, such that attention starts by copying.

    A head's value and output projections are transposes of one another, so that what a head attends to is passed on as
    it is (mimetic initialisation, Trockman and Kolter 2023), and embeddings are large enough for their own logits.
    Names are copied after a hundred steps; with independent matrices it takes thousands.
    """
    rng = torch.Generator().manual_seed(seed)
    each = shape.heads // shape.kv_heads

    def normal(*size: int, std: float = 0.02) -> Tensor:
        return torch.randn(*size, generator=rng) * std

    weights = {
        "model.embed_tokens.weight": normal(shape.vocab, shape.hidden, std=0.1),
        "model.norm.weight": torch.ones(shape.hidden),
    }
    for layer in range(shape.layers):
        values = torch.empty(shape.kv_heads * shape.head_dim, shape.hidden)
        torch.nn.init.orthogonal_(values, gain=0.5, generator=rng)
        heads = values.view(shape.kv_heads, shape.head_dim, shape.hidden).repeat_interleave(each, 0)
        named = {
            "input_layernorm": torch.ones(shape.hidden),
            "post_attention_layernorm": torch.ones(shape.hidden),
            "self_attn.q_norm": torch.ones(shape.head_dim),
            "self_attn.k_norm": torch.ones(shape.head_dim),
            "self_attn.q_proj": normal(shape.heads * shape.head_dim, shape.hidden),
            "self_attn.k_proj": normal(shape.kv_heads * shape.head_dim, shape.hidden),
            "self_attn.v_proj": values,
            "self_attn.o_proj": heads.flatten(0, 1).T.contiguous(),
            "mlp.gate_proj": normal(shape.ffn, shape.hidden),
            "mlp.up_proj": normal(shape.ffn, shape.hidden),
            "mlp.down_proj": normal(shape.hidden, shape.ffn),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in named.items()}
    return weights


def write_companions(folder: Path) -> PreTrainedTokenizerFast:
    """Writes everything but the weights into ``folder``; the tokenizer."""
    make_tokenizer.save(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    texts = {
        "config.json": CONFIG | ends | {"bos_token_id": None, "vocab_size": len(tokenizer)},
        "generation_config.json": ends | {"do_sample": True, "temperature": 1.0},
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return tokenizer


class Examples:
    """An endless stream of tokenised transcripts, none of them of a task that the run trains on or is tested on."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._rng = random.Random(seed)
        self._tokenizer = tokenizer
        self._renderer = Qwen3Renderer(tokenizer)
        self._templates = Templates.load()
        tasks = make_tasks.draw(make_tasks.SEED, make_tasks.TRAIN + make_tasks.HELDOUT)
        self._kept_apart = {task.instruction for task in tasks}

    def take(self, count: int) -> list[Example]:
        """The next ``count`` examples."""
        taken: list[Example] = []
        while len(taken) < count:
            told = transcript(self._rng)
            if told.task.instruction not in self._kept_apart:
                ids, mask = token_ids(told, self._renderer, self._tokenizer, self._templates)
                taken.append(Example(np.array(ids), np.array(mask)))
        return taken


def rate(step: int, steps: int) -> float:
    """Learning rate of a step: linear warm-up, then half a cosine down to ``LAST`` of ``RATE``."""
    cosine = (1 + math.cos(math.pi * step / steps)) / 2
    return RATE * min(1, (step + 1) / WARMUP) * (LAST + (1 - LAST) * cosine)


def main(folder: Path, steps: int = STEPS) -> float:
    """Makes the policy in ``folder``; the mean loss of the last fifty steps, in nats a token."""
    tokenizer = write_companions(folder)
    shape = shape_from_dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    policy = build_policy(shape, seed=SEED)
    policy.load_hf(fresh_weights(shape, SEED))
    trainer = SupervisedTrainer(policy, OptimizerConfig(lr=RATE, beta2=0.98, weight_decay=0.01))
    examples = Examples(tokenizer, SEED)
    losses: list[float] = []
    start = time.monotonic()
    for step in range(steps):
        losses.append(trainer.step(examples.take(BATCH), rate(step, steps)))
        if step % 100 == 99 or step == steps - 1:
            recent, seconds = sum(losses[-50:]) / len(losses[-50:]), time.monotonic() - start
            print(f"step {step + 1}/{steps}  loss {recent:.4f} nats/token  {seconds:.0f} s", flush=True)
    trainer.export(folder)
    return recent


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "policy")
