"""What one algorithm is, and the registry of them: a new one is a module of its own and a line in `ALGORITHMS`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gyre.objective import dapo, grpo, gspo
from gyre.objective.sequences import Sequences


class Algorithm(Protocol):
    """Two choices: which ratio the clip looks at, and how targets are averaged over a step."""

    @property
    def token_mean(self) -> bool:
        """True: every target of the step weighs the same. False: every rollout does, and every target within it."""
        ...

    def ratios(self, log_ratio: Tensor, sequences: Sequences) -> Tensor:
        """[N] to [N], without gradient: the importance ratio of each target from log pi - log pi_old of all."""
        ...


ALGORITHMS: dict[str, Algorithm] = {"gspo": gspo.Gspo(), "grpo": grpo.Grpo(), "dapo": dapo.Dapo()}
"""By `objective.algorithm`."""
