"""The members that a group does without (`rollouts.over_submit`): ended where they are, and their tokens counted."""

from __future__ import annotations

from collections import deque

import numpy as np

from gyre.simulation.state import Arrival, CellState, StepState


class Surplus:
    """Ends surplus rollouts, at once and for nothing. `homeless`: the run's rollouts that wait for a cell."""

    def __init__(self, homeless: deque[Arrival]) -> None:
        self.homeless = homeless
        self.tokens = 0.0
        """Sampled by rollouts that were ended."""
        self.sampled = 0.0
        """Sampled by all rollouts that are over."""

    def left(self, step: StepState, rollout: int, part: float) -> None:
        """A rollout has left its cell by itself, with `part` of its tokens; what is ahead of it is its scoring."""
        tokens = step.scoring[rollout] = part * step.tokens[rollout]
        self.sampled += tokens

    def end(self, step: StepState, group: int, now: float) -> list[CellState]:
        """The group is complete: its members that wait never start, those that run are ended. Returns the cells whose
        batches have changed."""
        while step.queued and step.queued[0] // step.size == group:  # groups are launched whole, one after another
            step.queued.popleft()
        members = [r for r in range(group * step.size, (group + 1) * step.size) if r in step.live]
        changed: list[CellState] = []
        for rollout in members:
            step.longest_s = max(step.longest_s, now - step.live.pop(rollout))
            cell = step.cell_of.get(rollout)
            if rollout in step.scoring:
                self.tokens += step.scoring.pop(rollout)
            elif cell is not None and (step, rollout) in cell.members:
                self._sampled(step, rollout, self._take(cell, step, rollout, now))
                changed.append(cell)
            else:
                self._sampled(step, rollout, self._lost(step, rollout))
        return changed

    def _sampled(self, step: StepState, rollout: int, part: float) -> None:
        tokens = part * step.tokens[rollout]
        self.tokens += tokens
        self.sampled += tokens

    def _take(self, cell: CellState, step: StepState, rollout: int, now: float) -> float:
        """Take a rollout off its cell. Returns the part of its tokens that are sampled."""
        cell.advance(now)
        i = cell.members.index((step, rollout))
        part = cell.sampled(i)
        which = np.zeros(len(cell.members), bool)
        which[i] = True
        cell.drop(which)
        return part

    def _lost(self, step: StepState, rollout: int) -> float:
        """Take a rollout off those that wait for a cell, where it is there; else it has not needed one yet."""
        for i, arrival in enumerate(self.homeless):
            if arrival.step is step and arrival.rollout == rollout:
                del self.homeless[i]
                whole = step.tokens[rollout]
                return 0.0 if whole == 0 else 1.0 - arrival.tokens / whole
        return 0.0
