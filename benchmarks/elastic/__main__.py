"""`python -m benchmarks.elastic [paced] [real] [options]`: interleaved runs under every policy, then the tables.

Each run is kept in `--results` as soon as it has ended; a bench that was cut off goes on from there, and
`--rounds 0` prints what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.elastic.paced import AGENT, CONTEXT, SLACK, paced_run
from benchmarks.elastic.reading import Reading, read_run, to_json
from benchmarks.elastic.real import real_run
from benchmarks.elastic.runs import RunFailed, Way, async_way, end, live_run
from benchmarks.elastic.table import Measured, show
from benchmarks.elastic.workload import PacedWork, make_work, scaled_groups, scenario_of
from gyre.config import RunConfig
from gyre.scheduling import AsyncPolicy
from gyre.simulation import simulate
from gyre.simulation.recorded import read_recording
from gyre.simulation.trace import write_trace
from gyre.store.db import make_engine

OURS = "elastic, staleness 1"
ROLLOUTS_PER_SLOT = 2.0
"""Rollouts generate for about half of their time. Only `elastic` has such a setting; the launch window is as wide for
all."""
DECIDE_S = 0.1
"""Seconds between two decisions of the simulator: about what ElasticScheduler needs for one."""


@dataclass(frozen=True)
class Form:
    """A form of the bench: its ways, and the run of one of them in a data folder."""

    name: str
    title: str
    ways: list[Way]
    run: Callable[[Way, Path], RunConfig]
    agent: str | None


def main() -> None:
    """Parse, run, print."""
    x = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended from outside: the stack is stopped all the same
    for form in _forms(x):
        folder = x.results / form.name
        folder.mkdir(parents=True, exist_ok=True)
        if not _settings_fit(form, folder, x):
            sys.exit(f"{folder}: holds runs of other settings; give another --results")
        for number, way in _missing(form, folder, x):
            if x.only and not any(part in way.name for part in x.only):
                continue
            if x.limit_s and time.monotonic() - STARTED > x.limit_s:
                print("the time is over; the same command goes on from here")
                break
            _one(form, way, folder / _file(number, way), x)
        ways = {way.name: _measured(folder, way) for way in form.ways}
        found = {name: measured for name, measured in ways.items() if measured.readings}
        if found:
            show(form.title, found, OURS, os.cpu_count() or 1)


STARTED = time.monotonic()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic", description=__doc__)
    parser.add_argument("forms", nargs="*", metavar="paced|real", help="none: both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path(".gyre-bench"), help="folder of what was measured")
    parser.add_argument("--only", action="append", help="only ways whose name has this; may be repeated")
    parser.add_argument("--limit-s", type=float, default=0.0, help="begin no run after so many seconds")
    parser.add_argument("--keep", action="store_true", help="keep the runs' data folders")
    parser.add_argument("--split", type=int, action="append", default=[], help="also async with so many that train")
    paced = parser.add_argument_group("paced")
    paced.add_argument("--preset", default="terminal-tail", help="of gyre.simulation.presets")
    paced.add_argument("--cells", type=int, default=8)
    paced.add_argument("--slots", type=int, default=3, help="rollouts that fill a cell")
    paced.add_argument("--groups", type=int, help="of a step (default: the preset's rollouts, scaled as the slots are)")
    paced.add_argument("--group-size", type=int, default=8)
    paced.add_argument("--harness", choices=["mini-swe-agent", "light"], default="mini-swe-agent")
    paced.add_argument("--window", type=int, help="rollouts under way at once (default: cells x slots x 2)")
    paced.add_argument("--compression", type=float, default=75.0, help="seconds of the preset in one of ours")
    paced.add_argument("--per-token", type=float, default=50.0, help="tokens of the preset that one of ours stands for")
    x = parser.parse_args()
    if unknown := set(x.forms) - {"paced", "real"}:
        parser.error(f"no form is called {min(unknown)!r}; there are paced and real")
    x.forms = x.forms or ["paced", "real"]
    return x


def _forms(x: argparse.Namespace) -> Iterator[Form]:
    if "paced" in x.forms:
        x.groups = x.groups or scaled_groups(x.preset, x.slots, x.group_size)
        x.window = x.window or round(ROLLOUTS_PER_SLOT * x.cells * x.slots)
        work = make_work(
            x.preset, cells=x.cells, slots=x.slots, groups=x.groups, group_size=x.group_size, steps=x.steps,
            compression=x.compression, per_token=x.per_token, longest=CONTEXT - SLACK, seed=x.seed,
        )  # fmt: skip
        title = (
            f"(b) whole control plane, {x.cells} paced cells, {x.preset}: {x.steps} steps of {x.groups} x "
            f"{x.group_size}, time compressed {x.compression:g} times"
        )
        yield Form(
            "paced",
            title,
            _paced_ways(work, x.window, x.split),
            lambda way, data: paced_run(work, way, data, x.window, x.seed, light=x.harness == "light"),
            AGENT,
        )
    if "real" in x.forms:
        title = f"(a) SGLang and Megatron on two cells of one core: {x.steps} steps of the quickstart, slow tools"
        # A slot a rollout, as the quickstart has it: with two, one cell would be said to hold the whole window.
        ways = [*_serving_ways(1.0), Way("async 1 of 2 train, staleness 1", "async", 1)]
        yield Form("real", title, ways, lambda way, data: real_run(way, data, x.steps, x.seed), None)


def _serving_ways(rollouts_per_slot: float) -> list[Way]:
    return [
        Way(OURS, "elastic", 1, rollouts_per_slot=rollouts_per_slot),
        Way("elastic, staleness 0", "elastic", 0, rollouts_per_slot=rollouts_per_slot),
        Way("colocate, staleness 1", "colocate", 1),
        Way("colocate, staleness 0", "colocate", 0),
    ]


def _paced_ways(work: PacedWork, window: int, more: list[int]) -> list[Way]:
    """Async at the even split, at the one that the simulator finds best for this work, and at `more`."""
    splits = {work.cells // 2, best_split(work, window), *more}
    return [*_serving_ways(ROLLOUTS_PER_SLOT), *(async_way(train, work.cells) for train in sorted(splits))]


def best_split(work: PacedWork, window: int) -> int:
    """Cells that train in the best fixed split, as the simulator says."""
    scenario = replace(scenario_of(work), window=window)

    def seconds(train: int) -> float:
        policy = AsyncPolicy(tuple(f"c{i}" for i in range(train)))
        return simulate(scenario, policy, staleness=1, decide_s=DECIDE_S).seconds

    return min(range(1, work.cells), key=seconds)


def _settings_fit(form: Form, folder: Path, x: argparse.Namespace) -> bool:
    """Whether the runs in the folder are of these settings; those of the first run are written down."""
    names = ["steps", "seed"]
    if form.name == "paced":
        names += ["preset", "cells", "slots", "groups", "group_size", "compression", "per_token", "window", "harness"]
    mine = {name: getattr(x, name) for name in names}
    file = folder / "settings.json"
    if not file.exists():
        file.write_text(json.dumps(mine, indent=1))
    return bool(json.loads(file.read_text()) == mine)


def _file(number: int, way: Way) -> str:
    return f"round-{number}-{way.name.replace(', ', '-').replace(' ', '-')}.json"


def _missing(form: Form, folder: Path, x: argparse.Namespace) -> Iterator[tuple[int, Way]]:
    """Runs that have not been measured: all ways of a round, in another order each time, before the next round."""
    for number in range(x.rounds):
        turn = number % len(form.ways)
        for way in [*form.ways[turn:], *form.ways[:turn]]:
            if not (folder / _file(number, way)).exists():
                yield number, way


def _one(form: Form, way: Way, result: Path, x: argparse.Namespace) -> None:
    data = Path(tempfile.mkdtemp(prefix=f"gyre-bench-{form.name}-"))
    kept = x.keep
    try:
        run = form.run(way, data)
        try:
            stack = live_run(run, data, form.agent, limit_s=1800.0)
        except RunFailed:
            kept = True
            raise
        try:
            engine = make_engine(stack.database_url, pool_size=1)
            reading, recording = read_run(engine, run.run_id), read_recording(engine, run.run_id)
            engine.dispose()
        finally:
            end(data)
    finally:
        if not kept:
            shutil.rmtree(data, ignore_errors=True)
    simulated = recording.replay().ends
    write_trace(recording.scenario, result.with_suffix(".trace.json"))
    result.write_text(json.dumps({"reading": to_json(reading), "simulated_ends": simulated}, indent=1))
    said = f"{reading.step_s:.1f} s a step, simulated {simulated[-1] / len(simulated):.1f}"
    where = f" ({data})" if kept else ""
    print(f"{time.strftime('%H:%M:%S')} {form.name}: {way.name}: {said}{where}", flush=True)


def _measured(folder: Path, way: Way) -> Measured:
    files = sorted(folder.glob(_file(0, way).replace("round-0-", "round-*-")))
    found = [json.loads(file.read_text()) for file in files]
    ends = [one["simulated_ends"] for one in found]
    return Measured([Reading(**one["reading"]) for one in found], [times[-1] / len(times) for times in ends])


if __name__ == "__main__":
    main()
