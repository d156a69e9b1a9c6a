"""The trainer against transformers' same model on the same sequences, one thread, float32: forward and backward, and a
whole step with Adam. The peer gets 2 MB pages too, which the trainer asks torch for (`gyre.training.megatron_cpu`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.table import interleave, show
from gyre.serving.cpu_platform import define_torchvision_ops
from gyre.training import megatron_cpu


def main() -> None:
    torch.set_num_threads(1)
    megatron_cpu.install()  # before torch makes a tensor
    define_torchvision_ops()  # transformers' models import torchvision, which cannot load its own operators on CPU
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    quickstart = Qwen3Config(
        vocab_size=2048, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, max_position_embeddings=1024, dtype="float32",
    )  # fmt: skip
    smollm2 = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, tie_word_embeddings=True, max_position_embeddings=8192, dtype="float32",
    )  # fmt: skip
    compare("quickstart's size", Qwen3ForCausalLM(quickstart), sequences=24, length=400, rounds=5)
    compare("SmolLM2-135M's size", LlamaForCausalLM(smollm2), sequences=4, length=300, rounds=3)


def compare(name: str, peer: Any, *, sequences: int, length: int, rounds: int) -> None:
    from gyre.config import OptimizerConfig
    from gyre.training.hf_config import shape_from_dict
    from gyre.training.model import build_policy
    from gyre.training.sft import Example, SupervisedTrainer

    shape = shape_from_dict(peer.config.to_dict())
    trainer = SupervisedTrainer(build_policy(shape), OptimizerConfig())
    rng = np.random.default_rng(0)
    lengths = rng.integers(length // 2, length * 3 // 2, sequences)
    rows = [rng.integers(0, shape.vocab, n).astype(np.int32) for n in lengths]
    examples = [Example(row, np.ones(len(row), bool)) for row in rows]
    tokens = int(lengths.sum())

    def rate(run: Callable[[], object]) -> Callable[[], float]:
        def measured() -> float:
            began = time.process_time()
            run()
            return tokens / (time.process_time() - began)

        return measured

    def one_by_one() -> None:
        peer.zero_grad()
        for row in rows:
            ids = torch.from_numpy(row.astype(np.int64))[None]
            F.cross_entropy(peer(ids).logits[0, :-1], ids[0, 1:], reduction="sum").backward()

    def padded() -> None:
        peer.zero_grad()
        for part in (rows[i : i + 8] for i in range(0, sequences, 8)):
            width = max(map(len, part))
            ids = torch.stack([torch.from_numpy(np.pad(row.astype(np.int64), (0, width - len(row)))) for row in part])
            keep = torch.arange(width)[None] < torch.tensor([len(row) for row in part])[:, None]
            logits = peer(ids, attention_mask=keep.long()).logits[:, :-1]
            F.cross_entropy(logits[keep[:, 1:]], ids[:, 1:][keep[:, 1:]], reduction="sum").backward()

    adam = torch.optim.AdamW(peer.parameters(), fused=True)

    def step() -> None:
        one_by_one()
        torch._foreach_div_([p.grad for p in peer.parameters()], tokens)
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        adam.step()

    trainer.step(examples[:2])
    step()
    packed, whole = "gyre, packed", "gyre, packed, with its step"
    results = interleave(
        {
            packed: rate(lambda: trainer.accumulate(examples)),
            "transformers, one by one": rate(one_by_one),
            whole: rate(lambda: trainer.step(examples)),
            "transformers, one by one, clipped, fused AdamW": rate(step),
            "transformers, padded batches of 8": rate(padded),
        },
        rounds,
    )
    title = f"Training, {name}, tokens per CPU second"
    with_step = {way: values for way, values in results.items() if way == whole or "AdamW" in way}
    rest = {way: values for way, values in results.items() if way not in with_step}
    show(f"{title}, forward and backward", "tokens/s", rest, packed, more_is_better=True)
    show(f"{title}, a step", "tokens/s", with_step, whole, more_is_better=True)
