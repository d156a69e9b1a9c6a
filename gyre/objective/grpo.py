"""GRPO (Shao et al., "DeepSeekMath", 2024, arXiv 2402.03300, eq. 3): a rollout's targets are one output.

r_t = pi_t / pi_old,t                                          the ratio of one token
l_t = -min( r_t A, clip(r_t, 1 - low, 1 + high) A )            averaged over each rollout's targets
"""

from __future__ import annotations

from torch import Tensor

from gyre.objective.sequences import Sequences


class Grpo:
    """One ratio a token; a mean over each rollout's targets, then over rollouts."""

    token_mean = False

    def ratios(self, log_ratio: Tensor, sequences: Sequences) -> Tensor:
        """r_t."""
        return log_ratio.exp()
