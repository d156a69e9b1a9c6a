"""Log-probs of sampler and trainer agree in float32, at any temperature, on the ids that were sampled."""

from __future__ import annotations

import httpx
import numpy as np
import pytest

from gyre.config import ObjectiveConfig, TrainerConfig
from gyre.training.batch import TrainSample, pack_samples
from gyre.training.trainer import Trainer


@pytest.fixture(scope="module")
def trainer(policy):
    trainer = Trainer(policy, TrainerConfig(), ObjectiveConfig())
    trainer.load(0, policy)
    return trainer


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_trainer_gives_the_behaviour_logprobs_of_the_engine(engine, trainer, temperature):
    rng = np.random.default_rng(0)
    vocabulary = trainer.policy.shape.vocab
    prompts = [rng.integers(5, vocabulary - 5, n).tolist() for n in (3, 17, 60)]
    sampling = {"temperature": temperature, "max_new_tokens": 40, "ignore_eos": True}
    body = {"input_ids": prompts, "return_logprob": True, "sampling_params": sampling}
    samples = []
    for prompt, answer in zip(
        prompts, httpx.post(f"{engine.url}/generate", json=body, timeout=120).json(), strict=True
    ):
        pairs = answer["meta_info"]["output_token_logprobs"]
        samples.append(
            TrainSample(
                rollout_id=f"rollout/{len(samples)}",
                ids=np.array(prompt + [token for _, token, *_ in pairs], np.int32),
                targets=np.arange(len(prompt), len(prompt) + len(pairs)),
                behaviour=np.array([logprob for logprob, *_ in pairs], np.float32),
                advantage=1.0,
                rollout_targets=len(pairs),
                temperature=temperature,
            )
        )
    figures = trainer.micro_batch(pack_samples(samples), "micro-batch 0").figures()
    assert figures["entropy"] > 0.1  # a policy that is sure of everything would prove nothing
    assert figures["mean_abs_logprob_diff"] < 1e-4
    assert figures["max_abs_logprob_diff"] < 1e-3
