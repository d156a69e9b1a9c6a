"""The page that `gyre simulate --timeline` writes: where the cells' time went, and what each cell did when."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gyre.report.svg import Bar, legend, stacks, timeline
from gyre.scheduling import AsyncPolicy
from gyre.simulation import Outcome, Scenario, simulate
from gyre.simulation.compare import Result, Way, decide_every

COLOURS = {
    "serve": "#4c78a8",
    "surplus": "#b07aa1",
    "serve idle": "#d5e1ee",
    "to train": "#9d755d",
    "train": "#f58518",
    "train idle": "#fbe3cb",
    "optimizer": "#54a24b",
    "to rollout": "#b79a8b",
}
MEANINGS = {
    "serve": "rollouts are live on it",
    "surplus": "the part of it that sampled what no group trains, in the sums alone",
    "serve idle": "it serves, and nobody is there",
    "to train": "role change",
    "train": "a micro-batch",
    "train idle": "it trains, and nothing is ready",
    "optimizer": "optimizer step and publication",
    "to rollout": "role change",
}
MOST_CELLS, MOST_STEPS = 24, 4
"""More of them cannot be read."""
STYLE = (
    "body{font:14px sans-serif;max-width:900px;margin:2em auto}text{font-size:11px}.key{display:inline-block;"
    "width:12px;height:12px;margin-right:4px}.legend{list-style:none;padding:0}.mark{stroke:#999}"
)


def page(scenario: Scenario, results: Sequence[Result], decide_s: float | None) -> str:
    """HTML of elastic, colocate and async side by side: the ways of `shown`."""
    chosen = shown(results, scenario.cells)
    every = decide_every(scenario) if decide_s is None else decide_s
    shown_states = [name for name in COLOURS if name != "surplus" or scenario.over_submit]
    key = legend([(name, COLOURS[name], MEANINGS[name]) for name in shown_states])
    title = escape(scenario.name)
    parts = [f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>{key}"]
    parts.append("<h2>Where the cells' hours went, a step</h2>" + _breakdown(scenario, chosen))
    for r in chosen:
        way = r.way
        run = simulate(
            scenario, way.policy, staleness=way.staleness, quorum=way.quorum, decide_s=every, timeline=True
        )  # fmt: skip
        parts.append(f"<h2>{escape(way.name)}: {run.seconds:.0f} s</h2>" + _cells(scenario, run))
    return "".join(parts)


def shown(results: Sequence[Result], cells: int) -> list[Result]:
    """Elastic at the highest staleness and on-policy, colocate likewise, async at the even and at the best split."""
    fixed = [r for r in results if isinstance(r.way.policy, AsyncPolicy)]
    found = [r for r in results if r.way.name.startswith(("elastic", "colocate")) and r.way.quorum is None]
    even = [r for r in fixed if isinstance(r.way.policy, AsyncPolicy) and len(r.way.policy.train_cells) == cells // 2]
    best = min(fixed, key=lambda r: r.outcome.seconds) if fixed else None
    return [*found, *even, *([best] if best is not None and best not in even else [])]


def _breakdown(scenario: Scenario, results: Sequence[Result]) -> str:
    rows = []
    for r in results:
        bars, at = [], 0.0
        cell_s = r.outcome.breakdown()
        for state, colour in COLOURS.items():
            hours = cell_s[state] / 3600 / len(scenario.steps)
            bars.append(Bar(at, at + hours, colour, f"{r.way.name}, {state}: {hours:.2f} cell-hours a step"))
            at += hours
        rows.append((_short(r.way), bars))
    return stacks(rows, "h")


def _short(way: Way) -> str:
    if isinstance(way.policy, AsyncPolicy):
        return f"async {len(way.policy.train_cells)}"
    return f"{way.name.split(',')[0]} s{way.staleness}"


def _cells(scenario: Scenario, run: Outcome) -> str:
    """The first steps of the first cells."""
    end = run.ends[min(len(run.ends), MOST_STEPS) - 1]
    rows: list[tuple[str, list[Bar]]] = []
    for cell in range(min(scenario.cells, MOST_CELLS)):
        bars = [
            Bar(s.start, min(s.end, end), COLOURS[s.state], f"{s.state}: {s.start:.0f} to {s.end:.0f} s")
            for s in run.spans
            if s.cell == cell and s.start < end
        ]
        rows.append((f"c{cell}" + (" central" if cell == 0 else ""), bars))
    return timeline(rows, end, [(at, f"v{i + 1}") for i, at in enumerate(run.ends) if at <= end])
