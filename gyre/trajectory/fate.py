"""What becomes of a sampled token. Every one has exactly one fate; the SQL view `token_accounting` says which.

The names are here and in `gyre/store/views.sql` (view `fate`), and nowhere else; a test holds the two together.
"""

from __future__ import annotations

from enum import StrEnum


class Fate(StrEnum):
    """In order of precedence: a token that several fit has the first. All but `trained` give no gradient (yet)."""

    EVALUATION = "evaluation", "sampled for a held-out measurement"
    AUXILIARY = "auxiliary", "of a call beside the work (a title, a topic check): never trained"
    INCOMPLETE = "incomplete", "of a call that the harness never got whole, one cut off by a time limit included"
    OPEN = "open", "its rollout runs, or is not handed out yet"
    SURPLUS = "surplus", "of a rollout that its group did without (rollouts.over_submit)"
    EXCLUDED_EVALUATOR = "excluded_evaluator", "its rollout has no reward: scoring failed as often as it may"
    EXCLUDED_INFRASTRUCTURE = "excluded_infrastructure", "its rollout has no reward: harness or host was lost"
    TOO_FEW_VALID = "too_few_valid", "its group has fewer than two valid rewards"
    NO_VARIANCE = "no_variance", "its group's rewards are all equal"
    LOW_VARIANCE = "low_variance", "its group's rewards differ by less than objective.min_std"
    STALE = "stale", "its rollout has a token older than rollouts.max_staleness allows"
    LATE = "late", "its call ended after its rollout was handed out"
    NOT_KEPT = "not_kept", "on branches beyond rollouts.branch_cap only"
    QUEUED = "queued", "in a micro-batch that no trainer has finished"
    REJECTED = "rejected", "taken out by objective.correction = 'mask' as its micro-batch was trained"
    TRAINED = "trained", "its term is in an accumulator or an optimizer step (also where the clip took its gradient)"

    meaning: str

    def __new__(cls, name: str, meaning: str) -> Fate:
        """A name with its meaning."""
        fate = str.__new__(cls, name)
        fate._value_ = name
        fate.meaning = meaning
        return fate
