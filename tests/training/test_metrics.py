"""What a micro-batch reports can be stored as JSON, whatever its numbers, and adds up."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from gyre.config import ObjectiveConfig
from gyre.objective import Targets, policy_loss
from gyre.training.metrics import MicroBatchMetrics, combine, measure


def a_micro_batch(difference: float) -> MicroBatchMetrics:
    """Two sequences of two targets; the first one's log-probs differ from the sampler's by `difference`."""
    logprobs = torch.full((4,), -1.0, requires_grad=True)
    behaviour = torch.tensor([-1.0 - difference, -1.0 - difference, -1.0, -1.0])
    targets = Targets(behaviour, torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.5]))
    config = ObjectiveConfig(correction="mask", correction_level="token", clip_low=0.2, clip_high=0.2)
    result = policy_loss(logprobs, targets, config)
    return measure(result, logprobs, behaviour, torch.zeros(4), tokens=6)


def stored(metrics: MicroBatchMetrics) -> dict[str, Any]:
    """As jsonb gives it back, which refuses Infinity and NaN."""
    loaded: dict[str, Any] = json.loads(json.dumps(metrics.to_json(), allow_nan=False))
    return loaded


@pytest.mark.parametrize("difference", [100.0, 1000.0])
def test_a_ratio_that_overflows_is_null_and_counted(difference: float) -> None:
    metrics = a_micro_batch(difference)
    assert metrics.rejected_targets == 2 and math.isinf(metrics.ratio_max)
    data = stored(metrics)
    assert (data["ratio_sum"], data["ratio_max"], data["mean_ratio"]) == (None, None, None)
    assert data["ratio_min"] == 1.0 and data["rejected_fraction"] == 0.5
    k3_too = difference > 709
    assert (data["mismatch_kl"] is None) == k3_too
    assert data["nonfinite"] == 2 + k3_too


def test_a_step_shows_what_one_of_its_micro_batches_could_not() -> None:
    good, bad = a_micro_batch(0.01), a_micro_batch(100.0)
    for parts in ((good, bad), (bad, good)):
        data = stored(combine(MicroBatchMetrics.from_json(stored(part)) for part in parts))
        assert (data["mean_ratio"], data["ratio_max"], data["nonfinite"]) == (None, None, 2)
        assert data["n_targets"] == 8 and data["ratio_min"] == 1.0
    again = combine([good, good])
    assert again.nonfinite == 0 and stored(again)["mean_ratio"] == pytest.approx((1 + math.exp(0.01)) / 2)


def test_no_sequence_has_no_extremes() -> None:
    data = stored(combine([]))
    assert data.keys().isdisjoint({"ratio_min", "ratio_max"}) and data["nonfinite"] == 0
    assert MicroBatchMetrics.from_json(data) == MicroBatchMetrics()
