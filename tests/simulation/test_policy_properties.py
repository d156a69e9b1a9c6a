"""The policy's promises, over random event sequences: the simulator is the world, and every decision is looked at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.scheduling import ClusterView, Decision, ElasticPolicy
from gyre.simulation import CostModel, Outcome, Scenario, StepWork, lower_bound, simulate


@dataclass
class Watched:
    """Elastic, with what it may never do written down."""

    policy: ElasticPolicy = field(default_factory=ElasticPolicy)
    faults: list[str] = field(default_factory=list)

    def decide(self, view: ClusterView) -> Mapping[str, Decision]:
        decided = self.policy.decide(view)
        serving = [c for c in view.cells if c.role == "rollout"]
        stay = [c for c in serving if decided[c.name].role == "rollout"]
        if len(stay) < len(serving) and sum(c.max_running for c in stay) < view.water_level:
            self.faults.append(f"a cell left, and the rest cannot hold what is live: {view}")
        if view.water_level and not any(d.role == "rollout" for d in decided.values()):
            self.faults.append(f"nobody serves: {view}")
        held = sum(c.live for c in view.cells)
        heading = sum(c.max_running for c in view.cells if decided[c.name].role == "rollout")
        if held > heading and any(d.role == "train" and not c.central for c, d in zip(view.cells, decided.values(),
                                                                                      strict=True)):  # fmt: skip
            self.faults.append(f"live rollouts have no room, and a satellite trains: {view}")
        if view.steps_closed and not view.water_level and decided["c0"].role != "train":
            self.faults.append(f"only the optimizer step is left, and central serves: {view}")
        return decided


@st.composite
def worlds(draw: st.DrawFn) -> Scenario:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 6)))
    window = draw(st.sampled_from([None, 3, 8, 100]))
    cost = CostModel(
        slots=draw(st.integers(1, 5)), decode_s=1.0, decode_s_per_rollout=draw(st.sampled_from([0.0, 0.5])),
        prefill_tokens_s=10.0, train_tokens_s=10.0, micro_batch_tokens=draw(st.sampled_from([30.0, 1000.0])),
        to_train_s=draw(st.sampled_from([0.0, 3.0, 40.0])), to_rollout_s=draw(st.sampled_from([0.0, 2.0, 30.0])),
        optimizer_s=draw(st.sampled_from([0.0, 4.0])), micro_batch_s=draw(st.sampled_from([0.0, 1.0])),
        handout_s=draw(st.sampled_from([0.0, 2.0])), open_s=draw(st.sampled_from([0.0, 5.0])),
    )  # fmt: skip

    def step() -> StepWork:
        tail = rng.pareto(1.5, shape) + 0.2
        trained = rng.exponential(200.0, shape) * rng.integers(0, 2, (shape[0], 1))  # some groups give no gradient
        work = StepWork(30 * tail, 20 * tail, rng.exponential(20.0, shape), trained)
        aside = {name: rng.exponential(5.0, shape) for name in ("before_s", "after_s")}
        return work if window is None else replace(work, **aside)

    steps = [step() for _ in range(draw(st.integers(1, 5)))]
    drained = frozenset(draw(st.sets(st.integers(1, 5), max_size=2)))
    return Scenario("random", draw(st.integers(1, 6)), cost, steps, 1e9, window, drained)


@settings(max_examples=80, deadline=None)
@given(worlds(), st.integers(0, 2), st.sampled_from([None, 1, 3]), st.sampled_from([0.0, 1.0, 20.0]), st.booleans())
def test_elastic_keeps_its_promises(
    world: Scenario, staleness: int, quorum: int | None, decide_s: float, known: bool
) -> None:
    watched = Watched()
    run = simulate(world, watched, staleness=staleness, quorum=quorum, decide_s=decide_s, rates_known=known)
    assert watched.faults == []
    assert len(run.ends) == len(world.steps), "it ends"
    if known:
        _flaps_little(world, run)
    assert run.trained_tokens == pytest.approx(sum(float(s.trained.sum()) for s in world.steps)), "each token once"
    assert run.seconds >= lower_bound(world, staleness=staleness, quorum=quorum) * (1 - 1e-9)


def _flaps_little(world: Scenario, run: Outcome) -> None:
    """Of a cell's ways to training, each but two a step had work for it that was worth the way there and back."""
    cost = world.cost
    price = cost.to_train_s + cost.to_rollout_s
    work = sum(float(s.trained.sum()) for s in world.steps) / cost.train_tokens_s
    earned = work / price if price > 0 else math.inf
    assert run.switches <= 2 * (world.cells * 2 * len(world.steps) + earned)
