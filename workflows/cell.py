"""Cell: the lock of one cell. One role change at a time, and while the role is `train`, training runs."""

from __future__ import annotations

import asyncio
import datetime as dt

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

from workflows import attributes as a
from workflows import messages as m
from workflows import verbs
from workflows.names import scheduler_workflow


@workflow.defn
class Cell:
    """States: rollout -> to_train -> train -> to_rollout -> rollout.

    Signals: `set_role`, `new_version`, `stop`, `go_on`.
    """

    @workflow.init
    def __init__(self, start: m.CellInput) -> None:
        self._plan, self._name = start.plan, start.cell
        self._role, self._want, self._reason = start.role, start.want, start.reason
        self._version, self._loaded, self._changes = start.version, start.loaded, start.changes
        self._stopped = False
        self._phases = dict(start.phases)
        self._since = start.since or workflow.time()
        self._reported: str | None = None
        self._reporting: asyncio.Task[None] | None = None

    @workflow.signal
    def set_role(self, role: m.SetRole) -> None:
        self._want, self._reason = role.role, role.reason

    @workflow.signal
    def new_version(self, version: int) -> None:
        self._version = max(self._version, version)

    @workflow.signal
    def stop(self) -> None:
        self._stopped = True

    @workflow.signal
    def go_on(self) -> None:
        """From a run that begins where the one before has ended and this cell, which it told to stop, has not yet: it
        may be in the midst of a micro-batch. It serves, as a new one would."""
        if self._stopped:
            self._stopped, self._want, self._reason = False, "rollout", "the run goes on"

    @workflow.query
    def role(self) -> m.CellChanged:
        return m.CellChanged(self._name, self._role)

    @workflow.run
    async def run(self, start: m.CellInput) -> None:
        self._show()
        if self._role == "unknown":  # an earlier run of the same stack may have left it training
            found = await verbs.cell_to_rollout(m.CellSwitch(self._plan.run_id, self._name, "the run begins"))
            self._role, self._loaded = found.role, max(self._loaded, found.version)
            self._show()
        while not await self._is_over():
            if self._role == "rollout":
                await self._serve()
            else:
                await self._train()
            if not self._stopped and workflow.info().is_continue_as_new_suggested():
                await self._all_reported()
                if self._stopped:  # meanwhile; what goes on would not know
                    continue
                workflow.continue_as_new(
                    m.CellInput(
                        self._plan, self._name, self._role, self._want, self._reason,
                        self._version, self._loaded, self._changes, self._phases,
                        self._since,
                    )
                )  # fmt: skip

    async def _is_over(self) -> bool:
        if self._stopped:
            await self._all_reported()
        return self._stopped

    async def _serve(self) -> None:
        """One thing that happens while the cell serves: a change of role, or new weights."""
        await workflow.wait_condition(lambda: self._stopped or self._want == "train" or self._version > self._loaded)
        if self._stopped:
            return
        if self._want == "train":
            self._become("to_train")
            switched = await verbs.cell_to_train(m.CellSwitch(self._plan.run_id, self._name, self._reason))
            self._reached(switched)
            return
        serving = await verbs.cell_load_weights(m.CellWeights(self._plan.run_id, self._name, self._version))
        self._loaded = max(self._loaded, serving.version, self._version)
        self._show()

    async def _train(self) -> None:
        """Training until the cell is wanted elsewhere; then the way back."""
        training = verbs.start_cell_train(m.CellTrain(self._plan.run_id, self._name))
        await workflow.wait_condition(lambda: self._stopped or self._want == "rollout" or training.done())
        if not training.done():
            training.cancel()
        try:
            await training
        except ActivityError as error:
            workflow.logger.info("cell_train ended: %s", error.cause)
        except asyncio.CancelledError:
            if workflow.cancellation_reason() is not None:
                raise
        if self._stopped or self._want != "rollout":
            return
        self._become("to_rollout")
        switched = await verbs.cell_to_rollout(m.CellSwitch(self._plan.run_id, self._name, self._reason))
        self._loaded = max(self._loaded, switched.version)
        self._reached(switched)

    def _become(self, role: str) -> None:
        self._role, self._phases, self._since = role, {}, workflow.time()
        self._changes += 1
        self._tell()

    def _reached(self, switched: m.CellSwitched) -> None:
        self._role, self._phases, self._since = switched.role, switched.phases, workflow.time()
        self._tell()

    def _tell(self) -> None:
        """Show the role, and have the scheduler told of it: what the cell does next does not wait for that."""
        workflow.upsert_search_attributes([a.ROLE.value_set(self._role), a.VERSION.value_set(self._loaded)])
        self._show()
        if self._reporting is None or self._reporting.done():
            self._reporting = asyncio.create_task(self._report())

    async def _report(self) -> None:
        """One signal at a time, so that the last one to arrive is the newest."""
        scheduler = workflow.get_external_workflow_handle(scheduler_workflow(self._plan.run_id))
        while self._reported != self._role:
            self._reported = role = self._role
            try:
                await scheduler.signal("cell_changed", m.CellChanged(self._name, role))
            except ApplicationError:
                workflow.logger.warning("the scheduler is over")

    async def _all_reported(self) -> None:
        if self._reporting is not None:
            await self._reporting

    def _show(self) -> None:
        since = dt.datetime.fromtimestamp(self._since, dt.UTC)
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self._phases.items())
        workflow.set_current_details(
            f"**{self._name}**: {self._role} since {since:%Y-%m-%d %H:%M:%S} UTC"
            + (f" ({self._reason})" if self._reason else "")
            + f"\n\nserves v{self._loaded}, newest v{self._version} · {self._changes} role changes"
            + (f"\n\nlast change: {phases}; {sum(self._phases.values()):.2f} s in all" if phases else "")
        )
