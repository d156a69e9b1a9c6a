"""The loss, in plain torch: advantages of groups, and a policy loss with one module an algorithm.

See docs/objective.md for the formulas and how the parts go together.
"""

from gyre.objective.advantages import GroupAdvantages, group_advantages
from gyre.objective.algorithm import ALGORITHMS, Algorithm
from gyre.objective.loss import LossResult, Targets, divisor, policy_loss, target_weight

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "GroupAdvantages",
    "LossResult",
    "Targets",
    "divisor",
    "group_advantages",
    "policy_loss",
    "target_weight",
]
