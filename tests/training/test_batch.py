"""From rows to arrays: what the rows say must fit what they hold."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gyre.store.queries import PathNode, SampleRows
from gyre.store.tokens import pack_ids, pack_logprobs
from gyre.training.batch import BatchError, pack_samples, sample_from_rows


def node(number, start, ids, *, generated=False, owned=False):
    logprobs = pack_logprobs(-np.asarray(ids) / 100) if generated else None
    return PathNode(number, generated, owned, start, len(ids), pack_ids(np.asarray(ids)), logprobs)


def rows(**changes):
    nodes = [
        node(1, 0, [10, 11, 12]),
        node(2, 3, [20, 21], generated=True),
        node(3, 5, [30]),
        node(4, 6, [40, 41, 42], generated=True, owned=True),
    ]
    whole = SampleRows(7, "run/s0/00/01", 9, 3, 5, 0.5, 0.8, nodes)
    return dataclasses.replace(whole, **changes)


def test_a_branch_is_joined_and_its_owned_tokens_are_targets():
    sample = sample_from_rows(rows())
    assert sample.ids.tolist() == [10, 11, 12, 20, 21, 30, 40, 41, 42]
    assert sample.targets.tolist() == [6, 7, 8]
    np.testing.assert_allclose(sample.behaviour, [-0.4, -0.41, -0.42], rtol=1e-6)
    assert (sample.advantage, sample.rollout_targets, sample.temperature) == (0.5, 5, 0.8)


def test_a_target_is_predicted_by_the_token_before_it():
    one = sample_from_rows(rows())
    packed = pack_samples([one, dataclasses.replace(one, temperature=2.0)])
    assert packed.lengths == (9, 9)
    assert packed.predictors.tolist() == [5, 6, 7, 14, 15, 16]
    assert packed.target_ids.tolist() == [40, 41, 42] * 2
    assert packed.ids[packed.predictors].tolist() == [30, 40, 41] * 2
    assert packed.sample.tolist() == [0, 0, 0, 1, 1, 1]
    np.testing.assert_allclose(packed.temperatures, [0.8] * 3 + [2.0] * 3)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (rows(n_tokens=8), "9 tokens and 3 targets, its row says 8 and 3"),
        (rows(n_targets=2), "its row says 9 and 2"),
        (rows(rollout_targets=2), "3 of the rollout's 2 targets"),
        (rows(nodes=rows().nodes[1:]), "node 2 covers tokens 3..5, expected 0.."),
        (rows(nodes=[*rows().nodes[:3], dataclasses.replace(rows().nodes[3], logprobs=None)]), "owned node 4"),
        (rows(nodes=[*rows().nodes[:3], dataclasses.replace(rows().nodes[3], generated=False)]), "owned node 4"),
        (rows(nodes=[node(1, 0, [1, 2], generated=True, owned=True)], n_tokens=2, n_targets=2), "nothing predicts it"),
    ],
)
def test_rows_that_contradict_each_other_are_refused(broken, message):
    with pytest.raises(BatchError) as caught:
        sample_from_rows(broken)
    assert str(caught.value).startswith("sample 7 of rollout run/s0/00/01: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("bad", [-np.inf, np.inf])
def test_a_behaviour_logprob_that_is_not_finite_is_refused(bad):
    last = dataclasses.replace(rows().nodes[3], logprobs=np.array([bad, -1, -1], "<f4").tobytes())
    with pytest.raises(BatchError, match="node 4 needs 3 finite log-probs"):
        sample_from_rows(rows(nodes=[*rows().nodes[:3], last]))


def test_an_empty_micro_batch_is_refused():
    with pytest.raises(BatchError, match="at least one sample"):
        pack_samples([])
