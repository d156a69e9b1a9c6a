"""`objective.ratio` and `objective.denominator`, measured: the toy policy learns off-policy under each value.

A batch is sampled by one version and trained in several optimizer steps, each on a part of it, as `max_staleness` lets
happen: the later steps' ratios leave 1, and the clip acts. Per seed all values begin with the same weights, tasks and
random numbers.
"""

from __future__ import annotations

import copy
import statistics
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.objective.toy import Batch, Policy, rewards, sample, tasks, warm_policy
from gyre.config import ObjectiveConfig, OptimizerConfig
from gyre.objective import Targets, group_advantages, policy_loss, target_weight

GROUPS, SIZE = 8, 8  # of one optimizer step
HELD_OUT = 400
WARM_STEPS = 50
CLIPS = ((3e-4, 4e-4), (0.01, 0.013), (0.2, 0.28))


@dataclass
class Learnt:
    """What one run came to. Rewards are of held-out tasks."""

    rewards: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    clipped: Counter[str] = field(default_factory=Counter)
    """Targets whose gradient the clip took, by the power of two that their branch's targets stay below, and
    `of <that>`: all targets."""
    trained: list[float] = field(default_factory=list)
    """Of each step, the share of rollouts in groups that give a gradient."""


def learn(start: Policy, objective: ObjectiveConfig, seed: int, batches: int, steps: int, lr: float) -> Learnt:
    """Train a copy of `start`; measured at first, half-way and at the end."""
    policy, learnt = copy.deepcopy(start), Learnt()
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    adam = OptimizerConfig()
    optimizer = torch.optim.Adam(policy.parameters(), lr=lr, betas=(adam.beta1, adam.beta2), eps=adam.eps)
    held_out = tasks(np.random.default_rng(12345), HELD_OUT, 1)
    for index in range(batches):
        if index in (0, batches // 2):
            learnt.rewards.append(_held_out(policy, held_out))
        parts = [tasks(rng, GROUPS, SIZE) for _ in range(steps)]
        sampled = [sample(policy, part, generator) for part in parts]  # all by the same version
        for part, (said, behaviour) in zip(parts, sampled, strict=True):
            _step(policy, optimizer, part, said, behaviour, objective, learnt)
    learnt.rewards.append(_held_out(policy, held_out))
    return learnt


def _held_out(policy: Policy, batch: Batch) -> float:
    """Mean reward over five samples of each task."""
    generator = torch.Generator().manual_seed(0)
    return float(np.mean([rewards(batch, sample(policy, batch, generator)[0]) for _ in range(5)]))


def _step(
    policy: Policy, optimizer: torch.optim.Optimizer, batch: Batch, said: Tensor, behaviour: Tensor,
    objective: ObjectiveConfig, learnt: Learnt,
) -> None:  # fmt: skip
    """One optimizer step as Gyre's trainer takes it: D * L of what is trained, divided by D, clipped, Adam."""
    advantages = torch.full((batch.rollouts,), float("nan"), dtype=torch.float64)
    for group, of in enumerate(rewards(batch, said).reshape(-1, SIZE)):
        found = group_advantages(of.tolist(), objective.normalize_std, objective.min_std)
        if found.outcome == "trained":
            advantages[group * SIZE : (group + 1) * SIZE] = torch.tensor(found.advantages, dtype=torch.float64)
    trained = int(advantages.isfinite().sum())
    learnt.trained.append(trained / batch.rollouts)
    if not trained:
        return
    kept = advantages[batch.rollout[batch.branch]].isfinite()  # tokens
    branches, branch = batch.branch[kept].unique(return_inverse=True)
    rollout = batch.rollout[branches]  # of each branch that is trained
    counts = torch.bincount(batch.rollout[batch.branch], minlength=batch.rollouts)
    unit, of = branch, rollout  # the sequence of each token, the rollout of each sequence
    if objective.ratio == "rollout":
        of, unit = rollout[branch].unique(return_inverse=True)
    targets = Targets(
        behaviour=behaviour[kept],
        sequence=unit,
        advantage=advantages[of],
        weight=torch.tensor([target_weight(objective, int(n)) for n in counts[of]], dtype=torch.float64),
    )
    logprobs = policy(batch.k[kept], batch.digit[kept]).gather(1, said[kept, None])[:, 0]
    result = policy_loss(logprobs, targets, objective)
    divisor = trained if objective.denominator == "trained" else batch.rollouts
    optimizer.zero_grad()
    (result.loss / divisor).backward()
    learnt.norms.append(float(torch.nn.utils.clip_grad_norm_(policy.parameters(), OptimizerConfig().clip_grad)))
    optimizer.step()
    _count(learnt, result.clipped, branch)


def _count(learnt: Learnt, clipped: Tensor, branch: Tensor) -> None:
    lengths = torch.bincount(branch)[branch]
    for length in lengths.unique().tolist():
        of = lengths == length
        learnt.clipped[f"{length}"] += int(clipped[of].sum())
        learnt.clipped[f"of {length}"] += int(of.sum())


def report(what: str, seeds: int, batches: int, steps: int, rates: list[float]) -> None:
    """Print what each value of `objective.<what>` came to, under several clips and learning rates."""
    torch.set_num_threads(1)
    values = ("branch", "rollout") if what == "ratio" else ("trained", "valid")
    console = Console(width=120)
    starts = [warm_policy(seed, WARM_STEPS) for seed in range(seeds)]
    for lr in rates:
        for low, high in CLIPS:
            runs: dict[str, list[Learnt]] = {value: [] for value in values}
            for seed, start in enumerate(starts):
                for value in values:
                    objective = ObjectiveConfig.model_validate({"clip_low": low, "clip_high": high, what: value})
                    runs[value].append(learn(start, objective, seed, batches, steps, lr))
            title = f"objective.{what}, clip {low:g}, {high:g}, lr {lr:g}: {seeds} seeds, {batches} x {steps} steps"
            console.print(_table(title, runs[values[0]], runs[values[1]], values))


def _table(title: str, first: list[Learnt], second: list[Learnt], values: tuple[str, str]) -> Table:
    table = Table("", *values, f"{values[1]} - {values[0]}", title=title)

    def row(name: str, of: list[list[float]]) -> None:
        difference = [b - a for a, b in zip(*of, strict=True)]
        error = statistics.stdev(difference) / len(difference) ** 0.5
        table.add_row(name, *map(_spread, of), f"{statistics.fmean(difference):+.4f} ± {error:.4f}")

    for i, when in enumerate(("at first", "half-way", "at the end")):
        row(f"held-out reward {when}", [[r.rewards[i] for r in x] for x in (first, second)])
    row("gradient norm", [[statistics.fmean(r.norms) for r in x] for x in (first, second)])
    norms = [[statistics.pstdev(r.norms) / statistics.fmean(r.norms) for r in x] for x in (first, second)]
    row("its deviation / its mean, over steps", norms)
    row("share of rollouts trained", [[statistics.fmean(r.trained) for r in x] for x in (first, second)])
    for length in sorted({int(k) for r in (*first, *second) for k in r.clipped if k.isdigit()}):
        shares = [[r.clipped[f"{length}"] / max(r.clipped[f"of {length}"], 1) for r in x] for x in (first, second)]
        row(f"clip fraction, branches of {length}", shares)
    return table


def _spread(values: list[float]) -> str:
    """Mean and standard deviation over seeds."""
    return f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}"
