"""A scenario as a file: what was measured, or what somebody wants to know.

    {"name": "my run", "cells": 2, "time_limit_s": 600, "cost": {"slots": 8, "decode_s": 0.01, ...},
     "steps": [{"tool_s": [[1.0, 2.5], [0.3, 0.4]], "tokens": [[...], [...]], "context": [[...], [...]],
                "trained": [[...], [...]]}, ...]}

Arrays are [groups, G]; the fields are those of `gyre.simulation.model`. A step may have `before_s`, `after_s` and
`rewarded`, and the scenario a `window`, the steps that open `drained` and `over_submit`.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from gyre.simulation.model import CostModel, Scenario, StepWork

_FACTS = ("time_limit_s", "window", "drained", "over_submit")


class TraceError(ValueError):
    """A trace file that cannot be simulated; the message names the file and the field."""


class _Step(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    tool_s: list[list[float]]
    tokens: list[list[float]]
    context: list[list[float]]
    trained: list[list[float]]
    before_s: list[list[float]] | None = None
    after_s: list[list[float]] | None = None
    rewarded: list[list[float]] | None = None


class _Trace(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    name: str
    cells: int
    time_limit_s: float
    cost: CostModel
    window: int | None = None
    drained: frozenset[int] = frozenset()
    over_submit: int = 0
    steps: list[_Step]


def read_trace(path: Path) -> Scenario:
    """The scenario in `path`. Raises TraceError."""
    try:
        trace = _Trace.model_validate_json(path.read_bytes())
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise TraceError(f"{path}: {where + ': ' if where else ''}{first['msg']}") from error
    try:
        steps = [StepWork(**{name: _array(rows) for name, rows in step if rows is not None}) for step in trace.steps]
        facts = {k: getattr(trace, k) for k in ("name", "cells", "cost", *_FACTS)}
        return Scenario(steps=steps, **facts)
    except ValueError as error:
        raise TraceError(f"{path}: {error}") from error


def _array(rows: list[list[float]]) -> np.ndarray:
    if len({len(row) for row in rows}) != 1:
        raise ValueError("steps: every group of a step has the same number of rollouts")
    return np.asarray(rows, np.float64)


def write_trace(scenario: Scenario, path: Path) -> None:
    """The reverse of `read_trace`."""
    steps = [{k: array.tolist() for k, array in vars(step).items() if array is not None} for step in scenario.steps]
    facts = {k: getattr(scenario, k) for k in ("name", "cells", *_FACTS)} | {"drained": sorted(scenario.drained)}
    path.write_text(json.dumps({**facts, "cost": vars(scenario.cost), "steps": steps}))
