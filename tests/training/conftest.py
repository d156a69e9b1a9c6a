"""A tiny policy, trainers over it, and a run in the database whose micro-batches they train."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

from gyre.config import ObjectiveConfig, OptimizerConfig, TrainerConfig
from gyre.training.batch import TrainSample
from gyre.training.convert import hf_shapes
from gyre.training.hf_config import ModelShape, read_shape
from gyre.training.trainer import Trainer
from gyre.training.weights import write_hf_weights

torch.set_num_threads(1)

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


def random_weights(shape: ModelShape, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights by Hugging Face's names, large enough that every gradient matters."""
    generator = torch.Generator().manual_seed(seed)

    def one(name: str, size: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(size, generator=generator) * 0.1
        return noise + 1.0 if "norm" in name else noise

    return {name: one(name, size) for name, size in hf_shapes(shape).items()}


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy folder."""
    return write_tiny_policy(tmp_path_factory.mktemp("policy"))


def write_tiny_policy(folder: Path) -> Path:
    """Make `folder` a policy folder: config.json, weights, and files that stand for a tokenizer's."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"stands": "for a tokenizer"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    write_hf_weights(random_weights(read_shape(folder)), folder)
    return folder


@pytest.fixture
def make_trainer(tiny_policy: Path) -> Callable[..., Trainer]:
    """Trainers of the tiny policy at version 0; keyword arguments are fields of the optimizer or the objective."""

    def make(*, ratio: str = "branch", clip: float = 0.2, **optimizer: float) -> Trainer:
        settings = TrainerConfig(optimizer=OptimizerConfig(**{"lr": 1e-2, **optimizer}), logprob_chunk=16)
        objective = ObjectiveConfig(ratio=ratio, clip_low=clip, clip_high=clip)
        trainer = Trainer(tiny_policy, settings, objective)
        trainer.load(0, tiny_policy)
        return trainer

    return make


def random_samples(seed: int, rollouts: int = 4, branches: int = 2, vocab: int = 96) -> list[TrainSample]:
    """Branches with two owned spans each; behaviour log-probs are not this policy's, so ratios move off 1."""
    rng = np.random.default_rng(seed)
    samples = []
    for rollout in range(rollouts):
        advantage = float(rng.normal())
        parts = []
        for _ in range(branches):
            n = int(rng.integers(12, 40))
            mask = np.zeros(n, bool)
            mask[4:7] = mask[9 : n - 1] = True
            parts.append((rng.integers(0, vocab, n).astype(np.int32), np.flatnonzero(mask)))
        total = sum(len(targets) for _, targets in parts)
        for ids, targets in parts:
            samples.append(
                TrainSample(
                    rollout_id=f"run/s0/00/{rollout:02d}",
                    ids=ids,
                    targets=targets,
                    behaviour=(-np.log(vocab) + rng.normal(0, 0.3, len(targets))).astype(np.float32),
                    advantage=advantage,
                    rollout_targets=total,
                    temperature=0.7,
                )
            )
    return samples
