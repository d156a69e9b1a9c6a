"""Form (a): the quickstart's engines and trainers on two cells, each pinned to a core, with slow tools.

The quickstart's tools end at once and say little; training its short rollouts takes a twentieth of a step. Here each
command of a rollout takes the rollout's own time, log-normal and seeded by its place in the run, so that every policy
meets the same, and prints LOG_CHARACTERS of log beside its output, as builds and tests do, which the trainer reads.
Programs of these names stand first in PATH for it: they sleep, run the real ones, and print.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from benchmarks.elastic.runs import Way
from gyre.config import RunConfig, load_run_config
from workers.stack.services import make_folders

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "run.toml"
COMMANDS = ("cat", "cp", "find", "grep", "head", "ls", "mkdir", "mv", "python3", "rm", "sed", "sort", "tail", "wc")
MEDIAN_S, SIGMA = 0.6, 1.3
"""Of a command's time: half of the rollouts wait 0.6 s a command, one in forty 8 s and more."""
LONGEST_S = 25.0
LOG_CHARACTERS = 600
"""Printed beside each command's output; the quickstart shows a policy the first 800 characters of both."""
LOG_LINE = "[ok] the file was read and the list is in order\n"
CONTEXT = 2048

TOOL = """#!/bin/sh
# {name}, slowly, and with a log beside its output. What it starts itself is neither.
PATH={path}
[ -n "$WAITED" ] && exec {name} "$@"
export WAITED=1
place=${{PWD#*/rollouts/}}; place=${{place#*/}}; place=${{place%%/box/*}}; place=${{place%%.a*}}
read -r wait < "{waits}/$place" && sleep "$wait"
{name} "$@"
code=$?
cat "{log}" >&2
exit $code
"""


def real_run(way: Way, data: Path, steps: int, seed: int = 0) -> RunConfig:
    """The quickstart's run under `way`, with slow tools, written below `data`."""
    make_folders(data)
    quickstart = load_run_config(QUICKSTART, seed=seed, steps=steps)
    tools = _write_tools(data / "tools", quickstart, seed)
    assert quickstart.harness.config is not None
    settings = quickstart.harness.config.read_text()
    slow = settings.replace("    LC_ALL: C\n", f"    LC_ALL: C\n    PATH: {tools}:{PATH}\n")
    slow = slow.replace("timeout: 10\n", f"timeout: {LONGEST_S + 30:.0f}\n")
    if slow.count(str(tools)) != 1 or "timeout: 10\n" in slow:
        raise RuntimeError(f"{quickstart.harness.config}: its environment is not what this bench expects")
    (data / "mini.yaml").write_text(slow)
    run = quickstart.model_copy(
        update={
            "name": "real",
            "policy": quickstart.policy.model_copy(update={"context": CONTEXT}),
            "tasks": quickstart.tasks.model_copy(update={"heldout": None}),
            "harness": quickstart.harness.model_copy(update={"config": data / "mini.yaml"}),
            # A rollout's time goes with its place, not with its task: what a task took before would only be noise.
            "rollouts": quickstart.rollouts.model_copy(update={"order": "shuffled"}),
        }
    )
    return way.of(run)


PATH = "/usr/local/bin:/usr/bin:/bin"


def _write_tools(folder: Path, run: RunConfig, seed: int) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    waits, bin_folder = folder / "waits", folder / "bin"
    bin_folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    shape = (run.steps, run.rollouts.groups_per_step, run.rollouts.group_size)
    seconds = np.minimum(MEDIAN_S * np.exp(SIGMA * rng.standard_normal(shape)), LONGEST_S)
    for (step, group, member), wait in np.ndenumerate(seconds):
        file = waits / f"s{step}" / f"{group:02d}" / f"{member:02d}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{wait:.3f}\n")
    (folder / "log.txt").write_text((LOG_LINE * LOG_CHARACTERS)[:LOG_CHARACTERS] + "\n")
    for name in COMMANDS:
        program = bin_folder / name
        program.write_text(TOOL.format(name=name, path=PATH, waits=waits, log=folder / "log.txt"))
        program.chmod(0o755)
    return bin_folder
