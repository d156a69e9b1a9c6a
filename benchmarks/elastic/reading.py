"""What a run of the bench did, from its Postgres: steps, what each cell did when, latencies, CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, RowMapping, text

STATES = ("serve", "serve idle", "to train", "train", "train idle", "optimizer", "to rollout")
"""As the simulator has them, but that a cell counts as serving only while a call runs on it."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Reading:
    """A run, measured. `ends` are the steps' ends from the first step's start, in seconds; `cell_s` the cells' seconds
    by state from then to the last end; `latency` medians in seconds; `cpu` CPU seconds by component in that time."""

    ends: tuple[float, ...]
    cell_s: Mapping[str, float]
    switches: int
    moved: int
    """Calls that more than one cell generated."""
    timeouts: int
    trained_tokens: int
    latency: Mapping[str, float]
    cpu: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """From the first step's start to the last one's end."""
        return self.ends[-1]

    @property
    def step_s(self) -> float:
        """Seconds a step."""
        return self.seconds / len(self.ends)

    @property
    def steady_s(self) -> float:
        """Seconds a step after the first, which fills the pipeline."""
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1) if len(self.ends) > 1 else self.seconds


def read_run(engine: Engine, run_id: str) -> Reading:
    """Read a run that has ended."""

    def ask(sql: str) -> Sequence[RowMapping]:
        with engine.connect() as connection:
            return connection.execute(text(sql), {"run": run_id}).mappings().all()

    steps = ask("""SELECT id, extract(epoch FROM started_at)::float8 AS began, extract(epoch FROM published_at)::float8
                   AS ended FROM steps WHERE run_id = :run ORDER BY index""")
    begin, end = steps[0]["began"], steps[-1]["ended"]
    cells = [row["name"] for row in ask("SELECT name FROM cells WHERE run_id = :run ORDER BY name")]
    changes = ask("""SELECT cell, to_role, extract(epoch FROM started_at)::float8 AS began,
                     extract(epoch FROM ended_at)::float8 AS ended FROM role_changes WHERE run_id = :run ORDER BY id""")
    batches = ask("""SELECT computed_by AS cell, extract(epoch FROM claimed_at)::float8 AS began,
                     extract(epoch FROM computed_at)::float8 AS ended, n_tokens AS tokens
                     FROM micro_batches JOIN steps ON steps.id = step_id WHERE run_id = :run""")
    calls = ask("""SELECT cells, extract(epoch FROM routed_at)::float8 AS began,
                   extract(epoch FROM calls.ended_at)::float8 AS ended
                   FROM calls JOIN rollouts ON rollouts.id = rollout_id
                   WHERE run_id = :run AND routed_at IS NOT NULL AND calls.ended_at IS NOT NULL""")
    optimizer = ask("""SELECT extract(epoch FROM (SELECT max(computed_at) FROM micro_batches
                       WHERE step_id = steps.id))::float8 AS began, extract(epoch FROM published_at)::float8 AS ended
                       FROM steps WHERE run_id = :run""")
    central = next(row["name"] for row in ask("SELECT name FROM cells WHERE run_id = :run AND central"))
    total = dict.fromkeys(STATES, 0.0)
    for cell in cells:
        busy = {
            "serve": [(c["began"], c["ended"]) for c in calls if c["cells"] and c["cells"][-1] == cell],
            "train": [(b["began"], b["ended"]) for b in batches if b["cell"] == cell and b["ended"] is not None],
            "optimizer": [(o["began"], o["ended"]) for o in optimizer if o["began"]] if cell == central else [],
        }
        for state, seconds in _of_cell([c for c in changes if c["cell"] == cell], busy, begin, end).items():
            total[state] += seconds
    timeouts = ask("SELECT count(*) AS n FROM rollouts WHERE run_id = :run AND outcome = 'timeout'")
    return Reading(
        ends=tuple(s["ended"] - begin for s in steps),
        cell_s=total,
        switches=len([c for c in changes if c["began"] >= begin]),
        moved=sum(len(c["cells"]) > 1 for c in calls),
        timeouts=timeouts[0]["n"],
        trained_tokens=sum(b["tokens"] for b in batches),
        latency={name: value for name, value in ask(_LATENCY)[0].items() if value is not None},
        cpu={row["component"]: row["cpu_s"] for row in ask(_CPU)},
    )


_MINE = "rollouts WHERE run_id = :run"
_MEDIANS = {
    "harness starts": ("harness_started_at - prepared_at", _MINE),
    "rollout scored": ("settled_at - harness_ended_at", _MINE),
    "call routed": (
        "c.routed_at - c.started_at",
        "calls c JOIN rollouts ON rollouts.id = rollout_id WHERE run_id = :run",
    ),
    "group handed out": (
        "g.settled_at - last",
        "groups g JOIN (SELECT group_id, max(settled_at) AS last FROM rollouts GROUP BY 1) r ON r.group_id = g.id"
        " WHERE g.run_id = :run",
    ),
    "to train": ("ended_at - started_at", "role_changes WHERE run_id = :run AND to_role = 'train'"),
    "to rollout": ("ended_at - started_at", "role_changes WHERE run_id = :run AND to_role = 'rollout'"),
}
"""Name: what is measured, and where."""
_LATENCY = "SELECT " + ", ".join(
    f'(SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM {what})::float8) FROM {where}) AS "{name}"'
    for name, (what, where) in _MEDIANS.items()
)
_CPU = """
SELECT component, sum(cpu_s)::float8 AS cpu_s FROM cpu_samples
 WHERE run_id = :run AND at >= (SELECT min(started_at) FROM steps WHERE run_id = :run)
   AND at <= (SELECT max(published_at) FROM steps WHERE run_id = :run) GROUP BY 1
"""


def _of_cell(
    changes: Iterable[RowMapping], busy: Mapping[str, list[Interval]], begin: float, end: float
) -> dict[str, float]:
    """Seconds of a cell by state between `begin` and `end`; a cell begins by serving."""
    out: dict[str, float] = dict.fromkeys(STATES, 0.0)
    role, since = "rollout", begin
    stretches: list[tuple[str, float, float]] = []
    for change in changes:
        began, ended = max(begin, change["began"]), min(end, change["ended"] or end)
        stretches += [(role, since, began), (f"to {change['to_role']}", began, ended)]
        role, since = change["to_role"], ended
    stretches.append((role, since, end))
    for what, a, b in stretches:
        if b <= a:
            continue
        if what.startswith("to "):
            out[what] += b - a
        elif what == "rollout":
            served = _covered(busy["serve"], a, b)
            out["serve"] += served
            out["serve idle"] += b - a - served
        else:
            trained = _covered(busy["train"], a, b)
            stepped = _covered(busy["optimizer"], a, b)
            out["train"] += trained
            out["optimizer"] += stepped
            out["train idle"] += max(0.0, b - a - trained - stepped)
    return out


def _covered(intervals: Iterable[Interval], begin: float, end: float) -> float:
    """Seconds of [begin, end] that any of the intervals covers."""
    covered, at = 0.0, begin
    for a, b in sorted(intervals):
        a, b = max(a, at), min(b, end)
        if b > a:
            covered, at = covered + b - a, b
    return covered


def to_json(reading: Reading) -> dict[str, Any]:
    """For a file: `Reading(**…)` reads it."""
    return dict(vars(reading))
