"""Forward and backward of the trainer against transformers' same model on the same sequences, one thread, float32."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.table import interleave, show
from gyre.serving.cpu_platform import define_torchvision_ops

SEQUENCES, LENGTH, VOCABULARY, ROUNDS = 24, 400, 2048, 5


def main() -> None:
    torch.set_num_threads(1)
    define_torchvision_ops()  # transformers' models import torchvision, which cannot load its own operators on CPU
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from gyre.config import OptimizerConfig
    from gyre.training.hf_config import shape_from_dict
    from gyre.training.model import build_policy
    from gyre.training.sft import Example, SupervisedTrainer

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, max_position_embeddings=1024, dtype="float32",
    )  # fmt: skip
    peer = Qwen3ForCausalLM(config)
    trainer = SupervisedTrainer(build_policy(shape_from_dict(config.to_dict())), OptimizerConfig())
    rng = np.random.default_rng(0)
    lengths = rng.integers(LENGTH // 2, LENGTH * 3 // 2, SEQUENCES)
    rows = [rng.integers(0, VOCABULARY, n).astype(np.int32) for n in lengths]
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
        for part in (rows[i : i + 8] for i in range(0, SEQUENCES, 8)):
            width = max(map(len, part))
            ids = torch.stack([torch.from_numpy(np.pad(row.astype(np.int64), (0, width - len(row)))) for row in part])
            keep = torch.arange(width)[None] < torch.tensor([len(row) for row in part])[:, None]
            logits = peer(ids, attention_mask=keep.long()).logits[:, :-1]
            F.cross_entropy(logits[keep[:, 1:]], ids[:, 1:][keep[:, 1:]], reduction="sum").backward()

    trainer.step(examples[:2])
    one_by_one()
    ways = {
        "gyre, packed (with its optimizer step)": rate(lambda: trainer.step(examples)),
        "transformers, one by one": rate(one_by_one),
        "transformers, padded batches of 8": rate(padded),
    }
    show("Training, tokens per CPU second", "tokens/s", interleave(ways, ROUNDS), next(iter(ways)), more_is_better=True)
