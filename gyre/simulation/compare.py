"""The same run under each policy, each baseline in the configurations that people use it in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gyre.scheduling import AsyncPolicy, ColocatePolicy, ElasticPolicy, Policy
from gyre.simulation.bound import lower_bound
from gyre.simulation.engine import simulate
from gyre.simulation.model import Scenario
from gyre.simulation.outcome import Outcome


@dataclass(frozen=True)
class Way:
    """A policy with its settings."""

    name: str
    policy: Policy
    staleness: int
    quorum: int | None = None


@dataclass(frozen=True)
class Result:
    """How a way did; `bound` is what no schedule of its staleness and quorum can beat, in seconds."""

    way: Way
    outcome: Outcome
    bound: float


@dataclass(frozen=True)
class Summary:
    """Elastic at a staleness beside its baselines, on one scenario. Ratios are the baseline's seconds by elastic's."""

    scenario: Scenario
    staleness: int
    elastic: Result
    on_policy: Result
    """Elastic at staleness 0."""
    colocate: float
    """Colocate, on-policy as it is used."""
    colocate_matched: float
    """Colocate at elastic's staleness."""
    colocate_on_policy: float
    """Colocate and elastic both at staleness 0."""
    even: float
    """Async with half of the cells in training."""
    best: float
    """Async at the best fixed split, `best_split` cells in training."""
    best_split: int
    even_bound: float
    """What of the even split no schedule could better: its seconds by elastic's bound. No ratio can be above it."""


def decide_every(scenario: Scenario) -> float:
    """Seconds between two decisions at the least: a tenth of what a change costs, and no less than real cells' 1 s."""
    return max(1.0, 0.1 * (scenario.cost.to_train_s + scenario.cost.to_rollout_s))


def ways(cells: int, staleness: int, quorum: int | None = None) -> Iterator[Way]:
    """Elastic, then colocate on-policy and at `staleness`, then async at every split (it needs a staleness of 1).

    `quorum` adds elastic with that quorum.
    """
    levels = sorted({0, staleness})
    for s in reversed(levels):
        yield Way(f"elastic, staleness {s}", ElasticPolicy(), s)
        if quorum is not None:
            yield Way(f"elastic, staleness {s}, quorum {quorum}", ElasticPolicy(), s, quorum)
    for s in reversed(levels):
        yield Way(f"colocate, staleness {s}", ColocatePolicy(), s)
    for k in splits(cells):
        yield fixed_split(k, cells, staleness)


def fixed_split(train: int, cells: int, staleness: int) -> Way:
    """Async with `train` cells in training, at `staleness`, or 1: with 0 its halves would wait for each other."""
    name = f"async {train} of {cells} train, staleness {max(1, staleness)}"
    return Way(name, AsyncPolicy(tuple(f"c{i}" for i in range(train))), max(1, staleness))


def splits(cells: int) -> list[int]:
    """Training cells of the fixed splits: all that there are of up to 12 cells, else twelfths."""
    if cells < 2:
        return []
    return list(range(1, cells)) if cells <= 12 else sorted({max(1, round(cells * k / 12)) for k in range(1, 12)})


def run_way(scenario: Scenario, way: Way, decide_s: float | None = None) -> Result:
    """Simulate one way."""
    every = decide_every(scenario) if decide_s is None else decide_s
    outcome = simulate(scenario, way.policy, staleness=way.staleness, quorum=way.quorum, decide_s=every)
    return Result(way, outcome, lower_bound(scenario, staleness=way.staleness, quorum=way.quorum))


def compare(
    scenario: Scenario, staleness: int = 1, quorum: int | None = None, *, decide_s: float | None = None
) -> Iterator[Result]:
    """Simulate every way, in order."""
    for way in ways(scenario.cells, staleness, quorum):
        yield run_way(scenario, way, decide_s)


def summarise(scenario: Scenario, staleness: int = 1, *, decide_s: float | None = None) -> Summary:
    """Elastic against its baselines. The best split is looked for from the even one on, downhill."""
    cells = scenario.cells
    if cells < 2:
        raise ValueError(f"scenario {scenario.name}: a fixed split needs two cells")

    def seconds(way: Way) -> float:
        return run_way(scenario, way, decide_s).outcome.seconds

    elastic = run_way(scenario, Way(f"elastic, staleness {staleness}", ElasticPolicy(), staleness), decide_s)
    on_policy = run_way(scenario, Way("elastic, staleness 0", ElasticPolicy(), 0), decide_s)
    ours, colocate_0 = elastic.outcome.seconds, seconds(Way("colocate", ColocatePolicy(), 0))
    even = seconds(fixed_split(cells // 2, cells, staleness))
    split, best = _downhill(lambda k: seconds(fixed_split(k, cells, staleness)), cells // 2, even, cells - 1)
    return Summary(
        scenario, staleness, elastic, on_policy,
        colocate=colocate_0 / ours,
        colocate_matched=seconds(Way("colocate", ColocatePolicy(), staleness)) / ours,
        colocate_on_policy=colocate_0 / on_policy.outcome.seconds,
        even=even / ours,
        best=best / ours,
        best_split=split,
        even_bound=even / elastic.bound,
    )  # fmt: skip


def _downhill(seconds: Callable[[int], float], start: int, at_start: float, most: int) -> tuple[int, float]:
    """The k in [1, most] with the fewest seconds, going from `start` while it gets better."""
    best = start, at_start
    for step in (1, -1):
        k = start + step
        while 1 <= k <= most and (found := seconds(k)) < best[1]:
            best = k, found
            k += step
        if best[0] != start:
            break
    return best
