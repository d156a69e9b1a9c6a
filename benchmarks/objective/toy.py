"""A task with branches of different lengths, and a small network that learns it: cheap enough for many seeds.

A task is one to five subtasks: "add k to each of these n digits, modulo 10", n of 1, 2, 4, 8 or 16. Each is a branch of
its own, as sub-agents are. The reward of a rollout is the share of its branches that are wholly right, as of hidden
tests. The policy says each digit of an answer from k and the digit that is asked; its loss is `gyre.objective`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

LENGTHS = (1, 2, 4, 8, 16)
MOST_BRANCHES = 5


class Policy(nn.Module):
    """Log-probs of ten digits from k (0 to 2, for adding 1 to 3) and a digit, both int64 [N]."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.k, self.digit = nn.Embedding(3, width), nn.Embedding(10, width)
        self.rest = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, 10))

    def forward(self, k: Tensor, digit: Tensor) -> Tensor:
        logits: Tensor = self.rest(torch.cat([self.k(k), self.digit(digit)], -1))
        return logits.log_softmax(-1)


@dataclass(frozen=True)
class Batch:
    """Rollouts, flat. Of each token [N]: `k`, `digit`, the `branch` it belongs to. `rollout` is of each branch [B]."""

    k: Tensor
    digit: Tensor
    branch: Tensor
    rollout: Tensor
    rollouts: int

    @property
    def right(self) -> Tensor:
        """The answer."""
        return (self.digit + self.k + 1) % 10


def tasks(rng: np.random.Generator, number: int, size: int) -> Batch:
    """`number` random tasks, each for `size` rollouts: rollout r is of task r // size."""
    k, digit, branch, rollout = [], [], [], []
    for task in range(number):
        subtasks = [
            (int(rng.integers(3)), rng.integers(0, 10, rng.choice(LENGTHS)))
            for _ in range(rng.integers(1, MOST_BRANCHES + 1))
        ]
        for member in range(size):
            for kind, digits in subtasks:
                k.append(np.full(len(digits), kind))
                digit.append(digits)
                branch.append(np.full(len(digits), len(rollout)))
                rollout.append(task * size + member)
    kinds, digits, branches = (torch.from_numpy(np.concatenate(x)) for x in (k, digit, branch))
    return Batch(kinds, digits, branches, torch.tensor(rollout), number * size)


@torch.no_grad()
def sample(policy: Policy, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens int64 [N] and their log-probs [N]."""
    distribution = policy(batch.k, batch.digit)
    said = torch.multinomial(distribution.exp(), 1, generator=generator)
    return said[:, 0], distribution.gather(1, said)[:, 0]


def rewards(batch: Batch, said: Tensor) -> NDArray[np.float64]:
    """[rollouts]: the share of each one's branches that are wholly right."""
    wrong = torch.zeros(len(batch.rollout), dtype=torch.float64).index_add_(
        0, batch.branch, (said != batch.right).double()
    )
    branches = torch.bincount(batch.rollout, minlength=batch.rollouts)
    passed = torch.zeros(batch.rollouts, dtype=torch.float64).index_add_(0, batch.rollout, (wrong == 0).double())
    found: NDArray[np.float64] = (passed / branches).numpy()
    return found


def warm_policy(seed: int, steps: int) -> Policy:
    """A policy that has seen `steps` batches of right answers: it is right now and then."""
    torch.manual_seed(seed)
    policy, rng = Policy(), np.random.default_rng(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = tasks(rng, 4, 1)
        loss = -policy(batch.k, batch.digit).gather(1, batch.right[:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy
