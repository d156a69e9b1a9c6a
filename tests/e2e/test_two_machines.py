"""A run whose cells are all on another machine, started as people start them; it is away for a while, then one dies."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cells.machines import Machines, two_machines_or_skip
from tests.e2e.conftest import LiveRun
from tests.e2e.test_kill import harnesses, trained_after

ROOT = Path(__file__).parents[2]
STEPS = 4
CUT_S = 45.0
"""Longer than a heartbeat's time-out (30 s), and than a lost network takes to be noticed (25 s); shorter than the
silence after which a trainer counts as dead (60 s)."""

pytestmark = pytest.mark.skipif(not os.environ.get("GYRE_EVERY_FAULT"), reason="two minutes: make faults")


def gyre(*arguments: object) -> str:
    argv = [sys.executable, "-m", "gyre.cli.main", *map(str, arguments)]
    return subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120).stdout


@contextlib.contextmanager
def agents(run: LiveRun, machines: Machines) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """The agents of the run's cells on the other machine, by what `gyre cells` prints, by cell."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for line in gyre("cells", "--data", run.data).splitlines():
            if not line.startswith("#"):
                argv = shlex.split(line.replace("GYRE_HOST=ADDRESS", f"GYRE_HOST={machines.there}"))
                with log_of(run, argv[-1]).open("wb") as out:
                    started[argv[-1]] = subprocess.Popen([*machines.prefix, *argv], cwd=ROOT, stdout=out, stderr=out)
        yield started
    finally:
        for agent in started.values():
            agent.terminate()
        for agent in started.values():
            agent.wait(60)


def log_of(run: LiveRun, cell: str) -> Path:
    return run.data.parent / f"agent-{cell}.log"


def test_a_run_whose_cells_are_all_elsewhere(start_run: Callable[..., LiveRun]) -> None:
    with contextlib.ExitStack() as ends:
        machines = ends.enter_context(two_machines_or_skip())
        stack = f'listen = "{machines.here}"\nremote_cells = ["central", "satellite"]'
        run = start_run(steps=STEPS, scheduling="colocate", budget=256, stack=stack)
        ends.callback(gyre, "down", "--data", run.data)  # while its address is there
        run.wait_for("the stack", run.ready)
        said = gyre("status", "--data", run.data)
        assert said.count("not seen yet") == 2
        assert f"Started by you on other machines: central, satellite. How: gyre cells --data {run.data}\n" in said
        started = ends.enter_context(agents(run, machines))
        run.wait_for("calls of the second step", lambda: trained_after(run, 0) and harnesses(run) > 0)
        machines.cut()
        time.sleep(CUT_S)
        machines.heal()
        run.wait_for("training of the third step", lambda: trained_after(run, 2))
        started["satellite"].kill()  # and nobody starts it again
        code = run.process.wait(timeout=900)
        assert code == 0, "".join(path.read_text() for path in (run.log, *(log_of(run, cell) for cell in started)))
        assert run.ask("select index, state from steps order by index") == [(i, "done") for i in range(STEPS)]
        assert run.ask("select version from weight_versions order by version") == [(v,) for v in range(STEPS + 1)]
        assert run.ask("select count(*) from micro_batches where state <> 'done'") == [(0,)]
        # The first step's harnesses may run out of time before a cell has come. After that no rollout is lost.
        lost = "select count(*) from rollout_summary where exclude_reason is not null and step > 0"
        assert run.ask(lost) == [(0,)]
        assert run.ask("select distinct computed_by from micro_batches order by 1") == [("central",), ("satellite",)]
        assert run.ask("select name, epoch from cells order by name") == [("central", 1), ("satellite", 1)]
        assert all("Traceback" not in log_of(run, cell).read_text() for cell in started)
