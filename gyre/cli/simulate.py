"""`gyre simulate`: what a policy would make of a workload, on one core."""

from __future__ import annotations

import statistics
from html import escape
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from gyre.cli.errors import CliError
from gyre.cli.output import console
from gyre.report.svg import Bar, legend, timeline
from gyre.scheduling import AsyncPolicy
from gyre.simulation import PRESETS, Outcome, Scenario, simulate
from gyre.simulation.compare import Result, Way, compare
from gyre.simulation.trace import TraceError, read_trace

_COLOURS = {
    "serve": "#4c78a8",
    "serve idle": "#d5e1ee",
    "to train": "#9d755d",
    "train": "#f58518",
    "train idle": "#fbe3cb",
    "optimizer": "#54a24b",
    "to rollout": "#b79a8b",
}
_MEANINGS = {
    "serve": "rollouts are live on it",
    "serve idle": "it serves, and nobody is there",
    "to train": "role change",
    "train": "a micro-batch",
    "train idle": "it trains, and nothing is ready",
    "optimizer": "optimizer step and publication",
    "to rollout": "role change",
}


def simulate_command(
    workload: Annotated[str, typer.Argument(help="A preset, or a trace file (*.json). `list` names the presets.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Steps (default: the preset's).")] = None,
    staleness: Annotated[int, typer.Option(min=0, help="max_staleness of elastic, colocate and async.")] = 1,
    quorum: Annotated[int | None, typer.Option(min=1, help="Also elastic with this quorum of settled members.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of a preset's work.")] = 0,
    decide: Annotated[float, typer.Option(min=0.0, help="Seconds between two decisions, at the least.")] = 1.0,
    timeline_file: Annotated[Path | None, typer.Option("--timeline", help="Write the cells' timelines here.")] = None,
) -> None:
    """Simulate a workload under elastic, colocate and async, on the policies that drive real cells."""
    if workload == "list":
        for name, preset in PRESETS.items():
            print(f"{name:14} {preset.title}; {preset.cells} cells, {preset.n_steps} steps")
        return
    scenario = _scenario(workload, seed, steps)
    results = list(compare(scenario, staleness, quorum, decide_s=decide))
    _print(scenario, results)
    if timeline_file is not None:
        timeline_file.write_text(_page(scenario, _shown(results), decide))
        print(f"timelines: {timeline_file}")


def _scenario(workload: str, seed: int, steps: int | None) -> Scenario:
    if workload in PRESETS:
        return PRESETS[workload].scenario(seed, steps)
    if not workload.endswith(".json"):
        raise CliError(
            f"no preset is named {workload!r}; there are {', '.join(PRESETS)}, or give a trace file (*.json)"
        )
    try:
        return read_trace(Path(workload))
    except TraceError as error:
        raise CliError(str(error)) from error


def _print(scenario: Scenario, results: list[Result]) -> None:
    best = results[0].outcome.seconds
    columns = (
        "policy",
        "s a step",
        "elastic is faster by",
        "of the bound",
        "serve",
        "train",
        "idle",
        "changes",
        "moved",
    )
    table = Table(*columns, title=f"{scenario.name}: {scenario.cells} cells, {len(scenario.steps)} steps")
    for column in table.columns[1:]:
        column.justify = "right"
    for r in results:
        share = {state: s / sum(r.outcome.cell_s.values()) for state, s in r.outcome.cell_s.items()}
        table.add_row(
            r.way.name,
            f"{r.outcome.seconds / len(scenario.steps):.0f}",
            f"{r.outcome.seconds / best:.2f}x",
            f"{r.bound / r.outcome.seconds:.0%}",
            f"{share['serve']:.0%}",
            f"{share['train'] + share['optimizer']:.0%}",
            f"{share['serve idle'] + share['train idle']:.0%}",
            str(r.outcome.switches),
            str(r.outcome.moved),
        )
    out = console()
    out.print(table)
    fixed = [r for r in results if isinstance(r.way.policy, AsyncPolicy)]
    if fixed:
        fastest = min(fixed, key=lambda r: r.outcome.seconds)
        middle = statistics.median(r.outcome.seconds for r in fixed)
        out.print(f"best fixed split: {fastest.way.name} ({fastest.outcome.seconds / best:.2f}x); "
                  f"median split {middle / best:.2f}x")  # fmt: skip


def _shown(results: list[Result]) -> list[Way]:
    """Elastic, colocate on-policy, and the best fixed split."""
    fixed = [r for r in results if isinstance(r.way.policy, AsyncPolicy)]
    colocate = [r.way for r in results if r.way.name.startswith("colocate")]
    best = [min(fixed, key=lambda r: r.outcome.seconds).way] if fixed else []
    return [results[0].way, *colocate[-1:], *best]


def _page(scenario: Scenario, ways: list[Way], decide: float) -> str:
    parts = []
    for way in ways:
        run = simulate(
            scenario, way.policy, staleness=way.staleness, quorum=way.quorum, decide_s=decide, timeline=True
        )  # fmt: skip
        parts.append(f"<h2>{escape(way.name)}: {run.seconds:.0f} s</h2>" + _cells(scenario, run))
    style = "body{font:14px sans-serif;max-width:900px;margin:2em auto}text{font-size:11px}.key{display:inline-block;"
    style += "width:12px;height:12px;margin-right:4px}.legend{list-style:none;padding:0}.mark{stroke:#999}"
    key = legend([(name, colour, _MEANINGS[name]) for name, colour in _COLOURS.items()])
    title = escape(scenario.name)
    return (
        f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{style}</style><h1>{title}</h1>{key}"
        + "".join(parts)
    )


def _cells(scenario: Scenario, run: Outcome) -> str:
    """The first steps of at most 24 cells: more cannot be read."""
    end = run.ends[min(len(run.ends), 4) - 1]
    rows: list[tuple[str, list[Bar]]] = []
    for cell in range(min(scenario.cells, 24)):
        bars = [
            Bar(s.start, min(s.end, end), _COLOURS[s.state], f"{s.state}: {s.start:.0f} to {s.end:.0f} s")
            for s in run.spans
            if s.cell == cell and s.start < end
        ]
        rows.append((f"c{cell}" + (" central" if cell == 0 else ""), bars))
    return timeline(rows, end, [(at, f"v{i + 1}") for i, at in enumerate(run.ends) if at <= end])
