"""The policy's view of what steps and cells report and of what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gyre.scheduling import Rates
from tests.workflows.script import plan
from workflows import messages as m
from workflows.cluster import cluster_view, rates_of

SERVE = {"c0": "rollout", "c1": "rollout"}
STEP = m.Observation("step-0", 0, queued=2, running=3, open_groups=1, ready_tokens=0, window=8)
EVALUATION = replace(STEP, source="eval-v0", order=1)


def cell(name: str, rollouts: int = 0, *, serves: bool = True) -> m.CellFacts:
    return m.CellFacts(name, serves, rollouts, 100 * rollouts, 800)


@pytest.mark.parametrize(
    ("facts", "rates"),
    [
        (m.ClusterFacts(), None),
        (m.ClusterFacts(train_tokens_s=9.0), None),
        (m.ClusterFacts(to_train_s=1.0, to_rollout_s=2.0), None),
        (m.ClusterFacts(train_tokens_s=9.0, to_train_s=1.0), Rates(9.0, 1.0, 1.0)),
        (m.ClusterFacts(train_tokens_s=9.0, to_rollout_s=2.0), Rates(9.0, 2.0, 2.0)),
        (m.ClusterFacts(train_tokens_s=9.0, to_train_s=1.0, to_rollout_s=2.0), Rates(9.0, 1.0, 2.0)),
    ],
)
def test_rates_need_a_micro_batch_and_one_change(facts: m.ClusterFacts, rates: Rates | None) -> None:
    assert rates_of(facts) == rates


def test_an_evaluation_is_served_and_never_trained() -> None:
    seen = cluster_view(plan(), [STEP, EVALUATION], SERVE, SERVE, m.ClusterFacts(oldest_age_s=10.0))
    assert (seen.water_level, seen.open_groups, seen.steps_open) == (10, 1, 1)
    assert seen.tail_s == 5.0


def test_a_cell_that_was_told_is_on_its_way_before_it_says_so() -> None:
    seen = cluster_view(plan(), [STEP], SERVE, {"c0": "train", "c1": "rollout"}, m.ClusterFacts())
    assert [c.role for c in seen.cells] == ["to_train", "rollout"]


@pytest.mark.parametrize(("counted", "level"), [(None, 5), (3, 3), (9, 5)])
def test_the_lower_level_counts(counted: int | None, level: int) -> None:
    """A step that is over may have left rollouts that nobody settled: they hold no cell back."""
    facts = m.ClusterFacts(live_rollouts=counted)
    assert cluster_view(plan(), [STEP], SERVE, SERVE, facts).water_level == level


def test_newcomers_are_dealt_to_those_that_serve() -> None:
    facts = m.ClusterFacts(running_rollouts=6, cells=[cell("c0", 1), cell("c1", 2)])
    assert [c.live for c in cluster_view(plan(), [STEP], SERVE, SERVE, facts).cells] == [3, 3]
    facts = m.ClusterFacts(running_rollouts=6, cells=[cell("c0", serves=False), cell("c1", 2)])
    seen = cluster_view(plan(), [STEP], SERVE, SERVE, facts)
    assert [(c.live, c.max_running, c.kv_tokens) for c in seen.cells] == [(0, 0, 0), (6, 4, 800)]
