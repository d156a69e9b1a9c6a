"""The async baseline: a fixed split of the cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gyre.scheduling.types import ClusterView, Decision


@dataclass(frozen=True)
class AsyncPolicy:
    """`train_cells` train always, the others serve always; an empty tuple means the central cell."""

    train_cells: tuple[str, ...] = ()

    def decide(self, view: ClusterView) -> Mapping[str, Decision]:
        train = set(self.train_cells) or {c.name for c in view.cells if c.central}
        reason = "fixed split"
        return {c.name: Decision("train" if c.name in train else "rollout", reason) for c in view.cells}
