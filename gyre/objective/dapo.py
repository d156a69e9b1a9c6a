"""DAPO's loss (Yu et al., "DAPO", 2025, arXiv 2503.14476, eq. 8): GRPO's ratio, a wider upper clip, a mean over tokens.

    L = ( 1 / sum_r N_r ) sum_r sum_t -min( r_t A, clip(r_t, 1 - low, 1 + high) A )

The sum of N_r runs over the samples of the whole step. It is known when the step closes; micro-batches add up plain
sums until then and are divided once, so the result does not depend on how a step was cut into them. (DAPO's dynamic
sampling is not here: groups without variance give no gradient, and are not sampled anew.)
"""

from __future__ import annotations

from gyre.objective.grpo import Grpo


class Dapo(Grpo):
    """One ratio a token; a mean over all targets of the step."""

    token_mean = True
