"""GSPO-token (Zheng et al., "Group Sequence Policy Optimization", 2025, arXiv 2507.18071).

    s_i   = exp( (1/n) sum_t (log pi_t - log pi_old,t) )          eq. 7, the length-normalised ratio of sequence i
    s_i,t = sg[s_i] * pi_t / sg[pi_t]                              eq. 14, sg: no gradient
    l_t   = -min( s_i,t A, clip(s_i,t, 1 - low, 1 + high) A )      eq. 13, averaged over each rollout's targets

A hundred tokens with a log-ratio of .01 each have the ratio e^.01, not e^1.
"""

from __future__ import annotations

from torch import Tensor

from gyre.objective.sequences import Sequences


class Gspo:
    """One ratio a sequence; a mean over each rollout's targets, then over rollouts."""

    token_mean = False

    def ratios(self, log_ratio: Tensor, sequences: Sequences) -> Tensor:
        """s_i for every target of sequence i."""
        return sequences.spread(sequences.mean(log_ratio).exp())
