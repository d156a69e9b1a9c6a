"""The same run under each policy, each baseline in the configurations that people use it in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gyre.scheduling import AsyncPolicy, ColocatePolicy, ElasticPolicy, Policy
from gyre.simulation.bound import lower_bound
from gyre.simulation.engine import Outcome, simulate
from gyre.simulation.model import Scenario


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
        name = f"async {k} of {cells} train, staleness {max(1, staleness)}"
        yield Way(name, AsyncPolicy(tuple(f"c{i}" for i in range(k))), max(1, staleness))


def splits(cells: int) -> list[int]:
    """Training cells of the fixed splits: all that there are of up to 12 cells, else twelfths."""
    if cells < 2:
        return []
    return list(range(1, cells)) if cells <= 12 else sorted({max(1, round(cells * k / 12)) for k in range(1, 12)})


def compare(
    scenario: Scenario, staleness: int = 1, quorum: int | None = None, *, decide_s: float = 1.0
) -> Iterator[Result]:
    """Simulate every way, in order."""
    for way in ways(scenario.cells, staleness, quorum):
        outcome = simulate(scenario, way.policy, staleness=way.staleness, quorum=way.quorum, decide_s=decide_s)
        yield Result(way, outcome, lower_bound(scenario, staleness=way.staleness, quorum=way.quorum))
