"""What is computed under every layout, and must not depend on it: see test_parallel.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gyre.config import LayoutConfig, ObjectiveConfig, OptimizerConfig, TrainerConfig
from gyre.training import parallel
from gyre.training.batch import pack_samples
from gyre.training.hf_config import ModelShape
from gyre.training.logprobs import TargetLogprobs, TargetQuery
from gyre.training.model import build_policy
from gyre.training.optimizer_state import export_state, import_state
from gyre.training.outcome import NonFiniteError
from gyre.training.streaming import StreamingStep
from gyre.training.trainer import Trainer
from gyre.trajectory.packed import TreeRow
from tests.training.conftest import random_samples, random_weights


def shape(family: str, tied: bool, vocab: int, layers: int = 2) -> ModelShape:
    """Small, and odd enough to hide nothing."""
    return ModelShape(
        family=family, layers=layers, hidden=24, ffn=36, heads=4, kv_heads=2, head_dim=8, vocab=vocab,
        max_positions=512, norm_eps=1e-6, rope_theta=1e4, tied=tied,
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model and an arithmetic. The vocabularies of 61 and 97 do not divide by two."""

    family: str
    tied: bool
    vocab: int
    dtype: torch.dtype
    layers: int = 2
    recompute: bool = False
    clip: float = 0.0

    @property
    def shape(self) -> ModelShape:
        return shape(self.family, self.tied, self.vocab, self.layers)


CASES = {
    "qwen3, tied, float64": Case("qwen3", True, 97, torch.float64, layers=4),
    "qwen3, tied, float32, clipped": Case("qwen3", True, 97, torch.float32, clip=1e-3),
    "llama, untied, float64, recompute": Case("llama", False, 61, torch.float64, recompute=True),
    "qwen2, untied, float32": Case("qwen2", False, 64, torch.float32),
}


def random_tree(rng: np.random.Generator, depth: int = 8, fan_out: int = 5, most: int = 14) -> TreeRow:
    """A row of one to three trees; segments may be of one token, and any node may fork."""
    lengths: list[int] = []
    parents: list[int] = []

    def grow(parent: int, level: int) -> None:
        index = len(lengths)
        lengths.append(int(rng.integers(1, 7)))
        parents.append(parent)
        if level < depth:
            for _ in range(int(rng.integers(0, fan_out + 1)) if rng.random() < 0.6 else 0):
                if len(lengths) < most:
                    grow(index, level + 1)

    for _ in range(int(rng.integers(1, 4))):
        grow(-1, 1)
    return TreeRow(tuple(lengths), tuple(parents))


@dataclass
class Work:
    """A row of trees with targets, and the weight of each target's log-prob in the loss."""

    row: TreeRow
    ids: Tensor
    query: TargetQuery
    weights: Tensor


def random_work(seed: int, vocab: int, dtype: torch.dtype, row: TreeRow | None = None) -> Work:
    """Some tokens of `row` (None: of random trees) are targets, each predicted by the token above it."""
    rng = np.random.default_rng(seed)
    row = row or random_tree(rng)
    above = np.arange(row.tokens) - 1
    for start, parent in zip(row.starts, row.parents, strict=True):
        above[start] = -1 if parent < 0 else row.starts[parent] + row.lengths[parent] - 1
    targets = np.array([t for t in range(row.tokens) if above[t] >= 0 and rng.random() < 0.7] or [1])
    targets = targets[np.argsort(above[targets], kind="stable")]
    positions, predictors = np.unique(above[targets], return_inverse=True)
    ids = torch.from_numpy(rng.integers(0, vocab, row.tokens))
    query = TargetQuery(
        positions=torch.from_numpy(positions),
        temperatures=torch.from_numpy(rng.uniform(0.5, 1.5, len(positions))),
        predictors=torch.from_numpy(predictors),
        ids=ids[torch.from_numpy(targets)],
        chunk=16,
    )
    return Work(row, ids, query, torch.from_numpy(rng.normal(size=len(targets))).to(dtype))


def parts(work: Work) -> Any:
    """Forward and loss of a micro-batch, as `StreamingStep` takes them. Not linear in the log-probs, as ratios are."""

    def loss(found: TargetLogprobs) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        value = (found.logprobs.square() * work.weights).sum()
        return value, (found.logprobs.detach().clone(), found.entropies.clone())

    return lambda policy: policy.target_logprobs(work.row, work.ids, work.query), loss


def spoiled(work: Work) -> Any:
    """The same with a loss that is not a number."""
    forward, loss = parts(work)
    return forward, lambda found: (loss(found)[0] * torch.nan, None)


def refusal(work: Any) -> str:
    """What a NonFiniteError says that every rank raises."""
    try:
        work()
    except NonFiniteError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def works(case: Case) -> list[Work]:
    """Packed sequences, and random trees, others for every case."""
    seed = list(CASES.values()).index(case) * 10
    plain = TreeRow.sequences((9, 1, 30, 2, 17))
    return [
        random_work(seed, case.vocab, case.dtype, plain),
        *(random_work(seed + i + 1, case.vocab, case.dtype) for i in range(case.layers // 2)),
    ]


def compute(case: Case, layout: LayoutConfig) -> dict[str, Any]:
    """Everything a trainer makes of the case, whole, on rank 0."""
    model = case.shape
    policy = build_policy(model, dtype=case.dtype, recompute=case.recompute, layout=layout)
    leader = policy.shard.tp_rank == policy.shard.pp_rank == 0
    weights = {n: t.to(case.dtype) for n, t in random_weights(model).items()}
    policy.load_hf(weights if leader else None)
    found: dict[str, Any] = {"exported": policy.export_hf()}
    stream = StreamingStep(policy, OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=case.clip))

    def gradients() -> dict[str, Tensor]:
        main = {name: p.main_grad for name, p in policy.model.named_parameters()}
        return {n: t.clone() for n, t in policy.to_hf(main, sums=True).items()}

    stream.begin()
    found["logs"] = [stream.micro_batch(*parts(work)) for work in works(case)]
    found["gradients"] = gradients()
    found["refused"] = [refusal(lambda: stream.micro_batch(*spoiled(works(case)[0])))]
    found["evaluated"] = stream.micro_batch(*parts(works(case)[1]), train=False)
    found["gradients after evaluation"] = gradients()
    if layout.pipeline_parallel > 1:
        stream.begin()
        found["logs at once"] = stream.micro_batches([parts(work) for work in works(case)])
        found["gradients at once"] = gradients()
    found["norms"] = [stream.finish(3)]
    found["stepped"] = policy.export_hf()
    found["state"] = export_state(policy, stream.optimizer)

    stream.begin()
    if leader:  # nobody else sees it
        next(policy.model.parameters()).main_grad[0] = torch.inf
    found["refused"].append(refusal(lambda: stream.finish(1)))
    for again in (False, True):  # this trainer goes on, then another one goes on from its state
        if again:
            policy.load_hf(dict(found["stepped"]) if leader else None)
            stream = StreamingStep(policy, stream.settings)
            import_state(policy, stream.optimizer, found["state"] if leader else None)
        stream.begin()
        stream.micro_batch(*parts(works(case)[1]))
        found["norms"].append(stream.finish(2))
        found["second step, resumed" if again else "second step"] = policy.export_hf()
    return found


def compute_all(layouts: list[LayoutConfig], names: list[str]) -> dict[tuple[int, int, str], dict[str, Any]]:
    """The cases of these names under every layout, in the same processes: (tp, pp, name) -> what `compute` gives."""
    from megatron.core import parallel_state

    found = {}
    for layout in layouts:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        for name in names:
            found[layout.tensor_parallel, layout.pipeline_parallel, name] = compute(CASES[name], layout)
    return found


def train(policy: Path, layouts: list[LayoutConfig], checkpoints: Path) -> list[dict[str, Any]]:
    """A step under each layout, resumed from the checkpoint of the step before; with a frozen reference policy."""
    from megatron.core import parallel_state

    settings = TrainerConfig(logprob_chunk=16, optimizer=OptimizerConfig(lr=1e-2, clip_grad=1e-2))
    objective = ObjectiveConfig(clip_low=0.2, clip_high=0.2, kl="k3", kl_reference="initial", kl_coefficient=0.1)
    found: list[dict[str, Any]] = []
    source = policy
    for version, layout in enumerate(layouts):
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        trainer = Trainer(policy, settings, objective, layout=layout)
        trainer.take(version, *(trainer.read(version, source) if parallel.rank() == 0 else (None, None)))
        metrics = trainer.micro_batch(pack_samples(random_samples(version, rollouts=3)), "all")
        gradient = trainer.gradient()
        result = trainer.optimizer_step(3)
        weights, state = trainer.export_hf(), trainer.export_optimizer()
        if parallel.rank() == 0:
            source = trainer.write(checkpoints, "run", None, weights, state)
        found.append({"metrics": metrics, "gradient": gradient, "norm": result.grad_norm, "weights": weights})
    return found
