"""From rows to one row of packed trees: what the rows say must fit what they hold."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gyre.store.queries import MicroBatchRows, NodeRow, SampleRow
from gyre.store.tokens import pack_ids, pack_logprobs
from gyre.training.batch import BatchError, TrainSample, pack_rows, pack_samples

ROLLOUT = "run/s0/00/01"


def node(number, parent, start, ids, *, generated=False):
    logprobs = pack_logprobs(-np.asarray(ids) / 100) if generated else None
    return NodeRow(number, ROLLOUT, parent, generated, start, len(ids), pack_ids(np.asarray(ids)), logprobs)


def line(sample=(), **changed):
    """One branch of four spans; `sample` replaces fields of its sample, n2 … n4 a node."""
    nodes = [
        node(1, None, 0, [10, 11, 12]),
        node(2, 1, 3, [20, 21], generated=True),
        node(3, 2, 5, [30]),
        node(4, 3, 6, [40, 41, 42], generated=True),
    ]
    nodes = [dataclasses.replace(n, **changed.get(f"n{n.id}", {})) for n in nodes if changed.get(f"n{n.id}", 1) != {}]
    row = SampleRow(7, ROLLOUT, 4, (4,), 9, 3, 5, 0.5, 0.8)
    return MicroBatchRows([dataclasses.replace(row, **dict(sample))], nodes)


def test_a_branch_is_joined_and_its_owned_tokens_are_targets():
    batch = pack_rows(line())
    assert (batch.row.lengths, batch.row.parents) == ((9,), (-1,))
    assert batch.ids.tolist() == [10, 11, 12, 20, 21, 30, 40, 41, 42]
    assert batch.positions.tolist() == [5, 6, 7]
    assert batch.target_ids.tolist() == [40, 41, 42]
    np.testing.assert_allclose(batch.behaviour, [-0.4, -0.41, -0.42], rtol=1e-6)
    np.testing.assert_allclose(batch.temperatures, [0.8] * 3)
    [head] = batch.samples
    assert dataclasses.astuple(head) == (ROLLOUT, 9, 3, 0.5, 5)


def test_a_shared_node_is_there_once_and_its_last_token_predicts_every_child():
    nodes = [
        node(1, None, 0, [10, 11]),
        node(2, 1, 2, [20, 21], generated=True),
        node(3, 2, 4, [30]),
        node(4, 3, 5, [40, 41], generated=True),
        node(5, 1, 2, [50], generated=True),
        node(6, 3, 5, [60, 61, 62], generated=True),
    ]
    samples = [
        SampleRow(1, ROLLOUT, 4, (2, 4), 7, 4, 8, 1.0, 0.5),
        SampleRow(2, ROLLOUT, 5, (5,), 3, 1, 8, 1.0, 0.5),
        SampleRow(3, ROLLOUT, 6, (6,), 8, 3, 8, 1.0, 0.5),
    ]
    batch = pack_rows(MicroBatchRows(samples, nodes))
    assert batch.ids.tolist() == [10, 11, 20, 21, 30, 40, 41, 60, 61, 62, 50]
    assert (batch.row.lengths, batch.row.parents) == ((2, 3, 2, 3, 1), (-1, 0, 1, 1, 0))
    assert batch.row.positions().tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 6, 7, 2]
    pairs = zip(batch.positions[batch.predictors], batch.target_ids, batch.sample, strict=True)
    assert [(int(p), int(t), int(s)) for p, t, s in pairs] == [
        *((1, 20, 0), (1, 50, 1), (2, 21, 0)),
        *((4, 40, 0), (4, 60, 2), (5, 41, 0), (7, 61, 2), (8, 62, 2)),
    ]
    assert batch.positions.tolist() == [1, 2, 4, 5, 7, 8]


def test_samples_apart_lie_side_by_side():
    one = TrainSample("a", np.arange(5, dtype=np.int32), np.array([2, 4]), np.array([-1.0, -2.0], "f4"), 1.0, 2, 0.8)
    batch = pack_samples([one, dataclasses.replace(one, temperature=2.0)])
    assert (batch.row.lengths, batch.row.parents) == ((5, 5), (-1, -1))
    assert batch.positions.tolist() == [1, 3, 6, 8]
    assert batch.predictors.tolist() == [0, 1, 2, 3]
    assert batch.target_ids.tolist() == [2, 4, 2, 4]
    assert batch.sample.tolist() == [0, 0, 1, 1]
    np.testing.assert_allclose(batch.temperatures, [0.8, 0.8, 2.0, 2.0])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (line({"n_tokens": 8}), "9 tokens and 3 targets, its row says 8 and 3"),
        (line({"n_targets": 2}), "its row says 9 and 2"),
        (line({"rollout_targets": 2}), "3 of the rollout's 2 targets"),
        (line(n1={}), "node 1 of its path is not there"),
        (line(n2={"start": 4}), "node 2 covers tokens 4..6, expected 3.."),
        (line(n2={"parent_id": 3}), "3 nodes hang on no root"),
        (line(n4={"logprobs": None}), "owned node 4 is not"),
        (line(n4={"generated": False}), "owned node 4 is not"),
        (line({"owned_nodes": (4, 9)}), "owned node 9 is not on its path"),
        (line({"owned_nodes": (), "n_targets": 0}), "has 0 of the rollout's 5 targets"),
        (
            MicroBatchRows(
                [SampleRow(7, ROLLOUT, 1, (1,), 2, 2, 2, 0.5, 0.8)], [node(1, None, 0, [1, 2], generated=True)]
            ),
            "nothing predicts it",
        ),
    ],
)
def test_rows_that_contradict_each_other_are_refused(broken, message):
    with pytest.raises(ValueError) as caught:
        pack_rows(broken)
    assert message in str(caught.value)


@pytest.mark.parametrize("bad", [-np.inf, np.inf])
def test_a_behaviour_logprob_that_is_not_finite_is_refused(bad):
    with pytest.raises(BatchError, match="node 4 needs 3 finite log-probs"):
        pack_rows(line(n4={"logprobs": np.array([bad, -1, -1], "<f4").tobytes()}))


def test_an_empty_micro_batch_is_refused():
    for make in (pack_samples, lambda samples: pack_rows(MicroBatchRows(samples, []))):
        with pytest.raises(BatchError, match="at least one sample"):
            make([])
