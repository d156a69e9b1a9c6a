"""The shape of a recorded tree, without its content: what a benchmark of trajectories needs of a real run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sqlalchemy import select

from gyre.store.db import transaction
from gyre.store.models import Node
from tests.gateway.harness_runs.run_harness import HarnessRun

FOLDER = "GYRE_RECORD_TREES"
"""Environment variable: the folder that shapes are written to (`benchmarks/trees/recorded`); none are without it."""


def shape(run: HarnessRun) -> list[dict[str, Any]]:
    """The tree's nodes, parents first, numbered anew. `kind` is the branch's kind of the call that made the node."""
    calls = {c.id: c for c in run.world.calls(run.member)}
    with transaction(run.world.db) as session:
        nodes = list(
            session.scalars(select(Node).where(Node.rollout_id == run.world.ids[run.member]).order_by(Node.id))
        )
    nodes.sort(key=lambda n: (n.start, n.id))
    number = {n.id: i for i, n in enumerate(nodes)}
    return [
        {
            "id": number[n.id],
            "parent_id": None if n.parent_id is None else number[n.parent_id],
            "generated": n.kind == "generated",
            "start": n.start,
            "length": n.length,
            "kind": calls[n.call_id].kind,
            "complete": calls[n.call_id].status == "complete",
        }
        for n in nodes
    ]


def record(run: HarnessRun, name: str) -> None:
    """Write the shape where `$GYRE_RECORD_TREES` says."""
    if folder := os.environ.get(FOLDER):
        rows = (json.dumps(row) for row in shape(run))
        Path(folder, f"{name}.json").write_text("[\n" + ",\n".join(rows) + "\n]\n")
