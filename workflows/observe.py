"""Telling the scheduler about one source of rollouts, with few signals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ApplicationError

from workflows import messages as m
from workflows.names import scheduler_workflow

SPACING = timedelta(seconds=1)
"""Least time between two reports that are not urgent: a settling rollout costs no signal of its own."""


class Observer:
    """Reports `state()` to the run's ElasticScheduler after `changed()`, at once after `urgent()`.

    A report is the whole state of its source, so changes that come close together need one only.
    """

    def __init__(self, run_id: str, state: Callable[[], m.Observation]) -> None:
        self._scheduler = workflow.get_external_workflow_handle(scheduler_workflow(run_id))
        self._state = state
        self._dirty = self._urgent = False
        self._told: m.Observation | None = None
        self._reporting = asyncio.Lock()
        """One signal at a time, so that the last one to arrive is the newest: after one that says `done` any other
        would bring its source back."""

    def changed(self) -> None:
        self._dirty = True

    def urgent(self) -> None:
        self._dirty = self._urgent = True

    async def run(self) -> None:
        """The reporting loop; run it as a task beside the work and cancel it at the end."""
        while True:
            await workflow.wait_condition(lambda: self._dirty)
            await self.report()
            try:
                await workflow.wait_condition(lambda: self._urgent, timeout=SPACING, timeout_summary="observe")
            except TimeoutError:
                continue

    async def report(self) -> None:
        """Report now, unless nothing changed since the last report."""
        async with self._reporting:
            self._dirty = self._urgent = False
            state = self._state()
            if state == self._told:
                return
            self._told = state
            try:
                await self._scheduler.signal("observe", state)
            except ApplicationError:
                # A run that is being stopped may have no scheduler any more; the rollouts do not depend on it.
                workflow.logger.warning("no scheduler to report %s to", state.source)
