"""What a paced cell takes for what it is asked: `gyre.simulation`'s cost model in seconds of the wall clock, in a file
of the data folder that its processes read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from gyre.simulation.model import CostModel

FILE = "paced.json"


def compressed(cost: CostModel, factor: float) -> CostModel:
    """The same cell, `factor` times as fast."""
    return replace(
        cost,
        decode_s=cost.decode_s / factor,
        decode_s_per_rollout=cost.decode_s_per_rollout / factor,
        prefill_tokens_s=cost.prefill_tokens_s * factor,
        train_tokens_s=cost.train_tokens_s * factor,
        to_train_s=cost.to_train_s / factor,
        to_rollout_s=cost.to_rollout_s / factor,
        optimizer_s=cost.optimizer_s / factor,
    )


def write_costs(data: Path, cost: CostModel) -> None:
    """For the cells of the stack whose data folder is `data`."""
    (data / FILE).write_text(json.dumps(vars(cost), indent=1))


def read_costs(data: Path) -> CostModel:
    """What `write_costs` wrote."""
    return CostModel(**json.loads((data / FILE).read_text()))
