"""Work by distribution: long-tailed rollouts with a time limit, whose lengths go with their task."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gyre.simulation.model import Floats, StepWork


@dataclass(frozen=True)
class Workload:
    """Log-normal rollouts. A rollout's size is `task factor * member factor`; tool time, tokens and context go with it.

    `tokens` is the median of sampled tokens, `tool_s` of seconds spent in tools, `context` of the prompt's mean length.
    `sigma_task` and `sigma_member` are the log-normal deviations between tasks and inside a group. A fraction `hung` of
    rollouts runs into the time limit whatever it does. `trained_contexts`: tokens that training a rollout computes, as
    a multiple of its mean context: its distinct tokens over the kept branches, each read once.
    """

    groups: int
    group_size: int
    tokens: float
    tool_s: float
    context: float
    sigma_task: float
    sigma_member: float
    trained_contexts: float
    hung: float = 0.0

    def step(self, rng: np.random.Generator) -> StepWork:
        """The work of one step."""
        return self.rollouts(self.tasks(rng), rng)

    def tasks(self, rng: np.random.Generator) -> Floats:
        """Logarithms of the task factors of one step, [groups, 1]."""
        return self.sigma_task * rng.standard_normal((self.groups, 1))

    def rollouts(self, tasks: Floats, rng: np.random.Generator) -> StepWork:
        """A group of rollouts of each of these tasks. The next call has the same tasks and members of its own, as
        another epoch has."""
        shape = (self.groups, self.group_size)
        size = np.exp(tasks + self.sigma_member * rng.standard_normal(shape))
        # Tools and model take turns, so both grow with the number of turns, but not in lockstep.
        tools = self.tool_s * size * np.exp(0.5 * rng.standard_normal(shape))
        tokens = self.tokens * size
        tools = np.where(rng.random(shape) < self.hung, 1e9, tools)
        context = self.context * np.sqrt(size)
        return StepWork(tools, tokens, context, self.trained_contexts * context)
