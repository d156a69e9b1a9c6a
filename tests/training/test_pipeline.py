"""A micro-batch cut for the pipeline: the same targets over the same paths; what belongs together stays together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.training.batch import PackedBatch, pack_rows, pack_samples
from gyre.training.pipeline import cut
from tests.training.conftest import random_samples
from tests.training.trees import micro_batch, rollouts


def described(batch: PackedBatch) -> list[tuple]:
    """Every target with the tokens that it is predicted from, and all that is known of it."""
    row = batch.row
    mask = row.mask()
    return sorted(
        (
            tuple(batch.ids[mask[batch.positions[p]]].tolist()),
            int(batch.target_ids[n]),
            float(batch.behaviour[n]),
            float(batch.temperatures[p]),
            int(batch.nodes[n]),
            str(batch.samples[batch.sample[n]]),
        )
        for n, p in enumerate(batch.predictors)
    )


@given(data=st.data(), most=st.integers(1, 6), whole=st.booleans())
@settings(max_examples=60, deadline=None)
def test_parts_hold_what_the_batch_held(data, most, whole):
    found = [data.draw(rollouts(number=i)) for i in range(data.draw(st.integers(1, 5)))]
    batch = pack_rows(micro_batch(found))
    parts = cut(batch, most, whole_rollouts=whole)
    assert 1 <= len(parts) <= most
    assert sorted(x for part in parts for x in described(part)) == described(batch)
    assert sum(part.row.tokens for part in parts) == batch.row.tokens
    assert sum(len(part.samples) for part in parts) == len(batch.samples)  # no sample in two parts
    if whole:
        names = [{s.rollout_id for s in part.samples} for part in parts]
        assert sum(map(len, names)) == len(set.union(*names))
    else:
        assert len(parts) > 1 or most == 1 or len({s.rollout_id for s in batch.samples}) == 1


@pytest.mark.parametrize("ratio", ["branch", "rollout"])
def test_parts_add_up_to_the_same_gradient_and_metrics(make_trainer, ratio):
    trainer = make_trainer(ratio=ratio)
    batch = pack_samples(random_samples(3, rollouts=5))
    whole = trainer.micro_batch(batch, "whole")
    expected = trainer.gradient()
    trainer.begin()
    parts = cut(batch, 4, whole_rollouts=ratio == "rollout")
    assert len(parts) == 4
    assert max(p.row.tokens for p in parts) < 0.5 * batch.row.tokens
    losses = [trainer.micro_batch(part, "part").loss for part in parts]
    assert sum(losses) == pytest.approx(whole.loss, rel=1e-5)
    assert (trainer.gradient() - expected).abs().max() < 1e-5 * expected.abs().max()
