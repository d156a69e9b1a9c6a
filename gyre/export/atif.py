"""A rollout as one file of the Agent Trajectory Interchange Format (ATIF v1.8), checked with the `atif` package.

The root trajectory is the rollout's first branch by rank; every other branch is in `subagent_trajectories`. A branch's
steps that an earlier trajectory of the file has too are marked `is_copied_context`. After a compaction,
`continued_trajectory_ref` names the trajectory that goes on. A sampled answer's ids and log-probs are in its step's
`metrics`; `prompt_token_ids`, which hold the whole prompt and so grow with the square of a rollout's length, are
written when asked for. What ATIF has no place for is in the root's `extra.gyre`: the rows of the rollout, and the ids
of its prompts once, so that an import gives back exactly what was exported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from atif import Trajectory
from pydantic import ValidationError
from sqlalchemy import Connection, DateTime

from gyre.export.errors import ExportError
from gyre.export.rows import TABLES, Importer, Row, Scope, check_scope, has_serial_id, read
from gyre.export.trajectories import trajectory
from gyre.store.tokens import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs

FORMAT = "gyre-1"


def export_atif(connection: Connection, scope: Scope, folder: Path, *, prompt_ids: bool = False) -> list[Path]:
    """Write one file for each rollout of `scope` that has calls into `folder`; returns the files.

    `prompt_ids`: also write the whole prompt of every call as `metrics.prompt_token_ids`. Raises ExportError.
    """
    check_scope(connection, scope)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ExportError(f"{folder} is not empty; name a new folder")
    rollouts = [row["id"] for batch in read(connection, scope, "rollouts") for row in batch]
    files = []
    for rollout in rollouts:
        rows = {t: [r for b in read(connection, Scope(scope.run, rollout=rollout), t) for r in b] for t in _KEPT}
        if not rows["calls"]:
            continue
        name = f"{rollout.replace('/', '-')}.json"
        in_steps = {call["leaf_id"] for call in rows["calls"]}
        document = trajectory(rows, name, prompt_ids=prompt_ids)
        document["extra"] |= {
            "gyre": {"format": FORMAT, "rows": {t: [_plain(r, in_steps) for r in rows[t]] for t in _KEPT}}
        }
        checked = _check(document, name)
        path = folder / name
        path.write_text(json.dumps(checked.to_json_dict(), ensure_ascii=False, allow_nan=False), encoding="utf-8")
        files.append(path)
    if not files:
        raise ExportError(f"run {scope.run}: no rollout with a call in what was asked for")
    return files


def import_atif(connection: Connection, path: Path, run_id: str | None = None) -> tuple[str, dict[str, int]]:
    """Insert the run whose rollouts are in the files of a folder (or in one file); returns its name and rows by table.

    Raises ExportError.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise ExportError(f"{path}: no .json file in it")
    found: dict[str, dict[Any, Row]] = {t: {} for t in _KEPT}
    for file in files:
        for table, rows in _rows_of(file).items():
            for row in rows:
                found[table][row["id"]] = row  # a run, a step and a group are in the files of all their rollouts
    importer = Importer(connection, run_id)
    counts = {}
    for table in _KEPT:
        rows = sorted(found[table].values(), key=_KEPT[table])
        if has_serial_id(table):
            importer.reserve(table, [row["id"] for row in rows])
        counts[table] = importer.insert(table, [rows] if rows else [])
    return importer.run_id, counts


_KEPT: dict[str, Callable[[Row], Any]] = {
    "runs": lambda r: r["id"],
    "steps": lambda r: r["id"],
    "evaluations": lambda r: r["id"],
    "groups": lambda r: r["id"],
    "rollouts": lambda r: r["id"],
    "scores": lambda r: r["id"],
    "micro_batches": lambda r: r["id"],
    "calls": lambda r: (r["rollout_id"], r["seq"]),
    "nodes": lambda r: (r["rollout_id"], r["start"], r["id"]),
    "samples": lambda r: r["id"],
}
"""Tables in the files, and an order in which their rows can be inserted."""


def _check(document: dict[str, Any], name: str) -> Trajectory:
    try:
        return Trajectory.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        raise ExportError(f"{name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _plain(row: Row, in_steps: set[int]) -> Row:
    """A row as JSON. The ids and log-probs of a node in `in_steps` are in the step that sampled them."""
    out: Row = {}
    for name, value in row.items():
        if name in ("token_ids", "logprobs"):
            if row["id"] not in in_steps and value is not None:
                out[name] = (unpack_ids(value) if name == "token_ids" else unpack_logprobs(value)).tolist()
        else:
            out[name] = value.isoformat() if isinstance(value, datetime) else value
    return out


def _rows_of(file: Path) -> dict[str, list[Row]]:
    try:
        document = json.loads(file.read_bytes())
    except ValueError as error:
        raise ExportError(f"{file}: not JSON ({error})") from error
    found = _check(document, str(file))
    ours = (found.extra or {}).get("gyre", {})
    if ours.get("format") != FORMAT:
        raise ExportError(f"{file}: no rows of Gyre in it (extra.gyre); only what `gyre export` wrote can be imported")
    sampled = dict(_sampled(found))
    rows: dict[str, list[Row]] = ours["rows"]
    for row in rows["nodes"]:
        ids, logprobs = sampled.get(row["id"], (row.get("token_ids"), row.get("logprobs")))
        if ids is None:
            raise ExportError(f"{file}: no step has the tokens of node {row['id']}")
        row["token_ids"] = pack_ids(ids)
        row["logprobs"] = None if logprobs is None else pack_logprobs(logprobs)
    for table, members in rows.items():
        times = [c.name for c in TABLES[table].columns if isinstance(c.type, DateTime)]
        for row in members:
            row |= {t: datetime.fromisoformat(row[t]) for t in times if row.get(t) is not None}
    return rows


def _sampled(document: Trajectory) -> Iterator[tuple[int, tuple[list[int], list[float]]]]:
    """Node, its ids and log-probs, of every step of the file that holds an answer."""
    for part in [document, *(document.subagent_trajectories or [])]:
        for step in part.steps:
            if step.metrics is not None and step.metrics.completion_token_ids is not None:
                assert step.extra is not None and step.metrics.logprobs is not None
                yield step.extra["node"], (step.metrics.completion_token_ids, step.metrics.logprobs)
