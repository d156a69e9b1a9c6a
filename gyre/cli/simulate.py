"""`gyre simulate`: what a policy would make of a workload, on one core."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from gyre.cli.data import DataOption, read_database
from gyre.cli.errors import CliError
from gyre.cli.simulate_page import page
from gyre.cli.simulate_tables import print_policies, print_recording, print_summary
from gyre.simulation import PRESETS, Scenario
from gyre.simulation.bound import serving_part
from gyre.simulation.compare import compare, summarise
from gyre.simulation.presets import Order
from gyre.simulation.recorded import DECIDE_S, RecordingError, read_recording
from gyre.simulation.trace import TraceError, read_trace, write_trace

SUMMED = ("nl2repo", "deepswe", "terminal", "terminal-tail", "2.4t")
"""Presets of `all`: those after published workloads."""


def simulate_command(
    workload: Annotated[
        str | None, typer.Argument(help="A preset, `all` of them, or a trace file (*.json). `list` names the presets.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="Simulate what this run did, beside what it took.")] = None,
    save: Annotated[Path | None, typer.Option("--save", help="Write the scenario here, as a trace file.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps (default: the preset's).")] = None,
    staleness: Annotated[int, typer.Option(min=0, help="max_staleness of elastic, colocate and async.")] = 1,
    quorum: Annotated[int | None, typer.Option(min=1, help="Also elastic with this quorum of settled members.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of a preset's work.")] = 0,
    order: Annotated[
        Order | None,
        typer.Option(
            help="Order in which a preset's steps launch their groups: longest_first (default) by what their tasks took"
            " an epoch before, shuffled, or oracle, by what they are going to take."
        ),
    ] = None,
    over_submit: Annotated[
        int | None,
        typer.Option(min=0, help="Rollouts of each of a preset's groups that it does without (rollouts.over_submit)."),
    ] = None,
    train_speed: Annotated[float, typer.Option(min=0.01, help="What if training were so many times as fast.")] = 1.0,
    decide: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Seconds between two decisions, at the least. Default: a tenth of a change's price."
        ),
    ] = None,
    timeline_file: Annotated[Path | None, typer.Option("--timeline", help="Write the cells' timelines here.")] = None,
    data: DataOption = None,
) -> None:
    """Simulate a workload under elastic, colocate and async, on the policies that drive real cells."""
    if (workload is None) == (run is None):
        raise CliError("give a preset, `all`, a trace file, or --run ID; `gyre simulate list` names the presets", 2)
    if workload == "list":
        for name, preset in PRESETS.items():
            print(f"{name:14} {preset.title}; {preset.cells} cells, {preset.n_steps} steps")
        return
    if order is not None and workload not in (*PRESETS, "all"):
        raise CliError(
            "--order: only a preset knows its tasks; a trace and a run launch in the order that they have", 2
        )
    if over_submit is not None and workload not in (*PRESETS, "all"):
        raise CliError(
            "--over-submit: only a preset can be given more members; a trace and a run have their own over_submit", 2
        )
    order, over_submit = order or "longest_first", over_submit or 0
    if workload == "all":
        chosen = {name: _faster(_scenario(name, seed, steps, order, over_submit), train_speed) for name in SUMMED}
        print_summary([(name, serving_part(s), summarise(s, staleness, decide_s=decide)) for name, s in chosen.items()])
        return
    scenario = _recorded(run, data) if run is not None else _scenario(str(workload), seed, steps, order, over_submit)
    scenario = _faster(scenario, train_speed)
    if save is not None:
        write_trace(scenario, save)
        print(f"trace: {save}")
    if run is not None and decide is None:
        decide = DECIDE_S
    results = list(compare(scenario, staleness, quorum, decide_s=decide))
    print_policies(scenario, results)
    if timeline_file is not None:
        timeline_file.write_text(page(scenario, results, decide))
        print(f"timelines: {timeline_file}")


def _recorded(run: str, data: Path | None) -> Scenario:
    try:
        recording = read_recording(read_database(data), run)
    except RecordingError as error:
        raise CliError(str(error)) from error
    print_recording(recording, recording.replay())
    return recording.scenario


def _faster(scenario: Scenario, train_speed: float) -> Scenario:
    cost = scenario.cost
    return replace(scenario, cost=replace(cost, train_tokens_s=cost.train_tokens_s * train_speed))


def _scenario(workload: str, seed: int, steps: int | None, order: Order, over_submit: int) -> Scenario:
    if workload in PRESETS:
        return PRESETS[workload].scenario(seed, steps, order, over_submit)
    if not workload.endswith(".json"):
        raise CliError(
            f"no preset is named {workload!r}; there are {', '.join(PRESETS)}, or give a trace file (*.json)"
        )
    try:
        return read_trace(Path(workload))
    except TraceError as error:
        raise CliError(str(error)) from error
