"""A training replica inside a run: the trainer, the ledger of micro-batches in Postgres, and the transfer of tensors.

The ledger says whose gradient lies in whose accumulator (`gyre.store.queries.ledger`); `held` is what this process
knows of its own. Both must name the same micro-batches whenever the accumulator leaves this process (`push`) or becomes
weights (`optimizer_step`); where they do not, the accumulator is thrown away and its micro-batches are queued again.
Every command may be sent again after a lost answer, and a process that dies loses only what the ledger gives back.

A push is taken while a micro-batch is computed, on a thread of its own (`take_push`), so that a satellite which leaves
waits for the network and not for central's work. What came is added before the next micro-batch, or the step.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from torch import Tensor

from gyre.config import RunConfig
from gyre.objective import divisor
from gyre.ports import LOOPBACK
from gyre.store import queries
from gyre.store.db import transaction
from gyre.store.queries import LedgerError
from gyre.training import checkpoint
from gyre.training.batch import PackedBatch, pack_rows
from gyre.training.metrics import MicroBatchMetrics, combine
from gyre.training.outcome import NonFiniteError, StepResult
from gyre.training.weights import read_hf_weights
from gyre.transfer import Ticket, TransferError, WeightPublisher, WeightPuller, open_publisher, open_puller

if TYPE_CHECKING:
    from gyre.training.trainer import Trainer

log = logging.getLogger("gyre.trainer")

Given = ParamSpec("Given")
Result = TypeVar("Result")


class CommandError(Exception):
    """A command that does not fit the replica's state; the message says what to send first."""


@dataclass(frozen=True)
class ReplicaSettings:
    """Who this replica is. `cell` is a cell of the run; `checkpoints` is the run's folder of checkpoints."""

    run: RunConfig
    cell: str
    central: bool
    checkpoints: Path
    incarnation: str
    epoch: int = 0
    """In which its agent has the cell; 0: it has no agent, and works only while the cell has none."""
    host: str = LOOPBACK
    """Address of this machine at which others pull what it publishes."""


def _in_turn(
    method: Callable[Concatenate[Replica, Given], Result],
) -> Callable[Concatenate[Replica, Given], Result]:
    """A command that reads or changes what is held: no push is taken over meanwhile."""

    def alone(self: Replica, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        with self._turn:
            return method(self, *args, **kwargs)

    update_wrapper(alone, method)
    return alone


class Replica:
    """The commands of a trainer process; see `gyre.training.client` for what each one promises."""

    def __init__(self, settings: ReplicaSettings, engine: Engine, trainer: Trainer | None = None) -> None:
        """`trainer` is what computes; None: Megatron, in the cell's layout."""
        self.settings = settings
        self.engine = engine
        self.run_id = settings.run.run_id
        self.trainer = _megatron(settings) if trainer is None else trainer
        self.step_id: int | None = None
        self.held: dict[int, MicroBatchMetrics | None] = {}
        """Micro-batches in the accumulator or in `_arrived`; those without metrics, which lie in their rows, were
        pushed."""
        self._arrived: Tensor | None = None
        """The sum of the pushed gradients that are not in the accumulator yet."""
        self._turn = threading.RLock()
        """Of `held` and the ledger's word on it. Not held while a micro-batch is computed."""
        self._pushed: dict[str, Any] | None = None
        self._taken: tuple[int, StepResult, Path | None] | None = None  # a step, and its folder, not committed yet
        self._weights: tuple[WeightPublisher, dict[str, Tensor]] | None = None
        self._gradients: tuple[WeightPublisher, Tensor] | None = None
        self._source: tuple[tuple[int, str], WeightPuller] | None = None  # of central's publisher
        self._next: tuple[int, PackedBatch] | None = None
        """A micro-batch that was made ready; set beside computations, by one assignment."""

    @property
    def version(self) -> int | None:
        return self.trainer.version

    @property
    def pushed(self) -> bool:
        return self._pushed is not None

    @property
    def asleep(self) -> bool:
        return self.trainer.asleep

    def commands(self) -> dict[str, Callable[..., dict[str, Any]]]:
        common: dict[str, Callable[..., dict[str, Any]]] = {
            "load": self.load,
            "begin": self.begin,
            "micro_batch": self.micro_batch,
            "prefetch": self.prefetch,
            "sleep": self.sleep,
            "wake": self.wake,
        }
        if self.settings.central:
            return common | {"absorb": self.absorb, "optimizer_step": self.optimizer_step, "publish": self.publish}
        return common | {"push": self.push, "reset": self.reset}

    def beside(self) -> dict[str, Callable[..., dict[str, Any] | None]]:
        """Commands that may run while another one computes, each on a thread of its own. One that returns None cannot
        now, and is to be sent to `commands`."""
        if self.settings.central:
            return {"prefetch": self.prefetch, "absorb": self.take_push}
        return {"prefetch": self.prefetch}

    def start(self) -> None:
        """Central: load the newest version (version 0 is the policy itself) and publish it under a new ticket."""
        if not self.settings.central:
            return
        with self._commit() as session:
            row = queries.newest_version(session, self.run_id)
            if row is None:
                queries.add_weight_version(session, self.run_id, 0, str(self.settings.run.policy.path))
            newest = 0 if row is None else row.version
            committed = {Path(folder).name for folder in queries.checkpoints(session, self.run_id)}
            checkpoint.clean(self.settings.checkpoints, committed, newest)
        self.load(newest)
        self.publish(newest)

    # ---- weights --------------------------------------------------------------------------------------------------

    @_in_turn
    def load(self, version: int) -> dict[str, Any]:
        if self.trainer.version == version:
            return {"version": version}
        with transaction(self.engine) as session:
            row = queries.weight_version(session, self.run_id, version)
        if row is None:
            raise CommandError(f"run {self.run_id} has no version {version}")
        if self.settings.central and self.trainer.version is not None and version < self.trainer.version:
            # Whoever asks looked at the run before the last optimizer step; central never goes back.
            raise CommandError(f"version {version} is over; central trains version {self.trainer.version}")
        self._leave_step(f"load version {version}")
        folder = Path(row.checkpoint)
        if self.settings.central:
            self.trainer.load(version, folder)
        else:
            pulled = None if row.ticket is None else self._pull_weights(row.ticket, version)
            if pulled is None and not folder.is_dir():  # on another machine than central, perhaps
                raise CommandError(
                    f"version {version}: it cannot be pulled from central now, and its checkpoint {folder} is not on "
                    "this machine; have the machines share that folder, or wait for central"
                )
            self.trainer.load(version, read_hf_weights(folder) if pulled is None else pulled)
        return {"version": version}

    def _pull_weights(self, ticket: Mapping[str, Any], version: int) -> dict[str, Tensor] | None:
        try:
            found, tensors = self._puller(Ticket.from_json(ticket)).pull()
        except TransferError as error:
            log.warning("version %d: cannot be pulled (%s); read from its checkpoint instead", version, error)
            self._close_puller()
            return None
        if found != version:
            log.warning("version %d: central publishes %d now; read from the checkpoint instead", version, found)
            return None
        return tensors

    def _puller(self, ticket: Ticket) -> WeightPuller:
        """Kept from pull to pull: fresh memory costs more time than the bytes that fill it."""
        publisher = (ticket.incarnation, ticket.address)
        if self._source is None or self._source[0] != publisher:
            self._close_puller()
            self._source = (publisher, open_puller(ticket, self.settings.host))
        return self._source[1]

    def _publisher(self, tensors: Mapping[str, Tensor]) -> WeightPublisher:
        return open_publisher(tensors, self.settings.run.stack.transfer, self.settings.host)

    def _close_puller(self) -> None:
        if self._source is not None:
            self._source[1].close()
            self._source = None

    @_in_turn
    def publish(self, version: int) -> dict[str, Any]:
        self.load(version)
        weights = self.trainer.export_hf()
        if self._weights is None:
            self._weights = (self._publisher(weights), weights)
        else:
            for name, tensor in self._weights[1].items():
                tensor.copy_(weights[name])
        ticket = self._weights[0].publish(version).to_json()
        with self._commit() as session:
            queries.set_ticket(session, self.run_id, version, ticket)
        return {"ticket": ticket}

    # ---- micro-batches --------------------------------------------------------------------------------------------

    @_in_turn
    def begin(self, step_id: int) -> dict[str, Any]:
        if self.step_id == step_id:
            return {}
        with transaction(self.engine) as session:
            step = queries.step_row(session, step_id)
        if step.state == "done":
            raise CommandError(f"step {step.index} of {step.run_id} is done")
        if step.index != self.trainer.version:
            raise CommandError(
                f"step {step.index} trains version {step.index}, but {self.trainer.version} is loaded; load it first"
            )
        self._leave_step(f"begin step {step.index}")
        self.step_id = step_id
        return {}

    def micro_batch(self, micro_batch_id: int) -> dict[str, Any]:
        with self._turn:
            known = micro_batch_id in self.held  # sent again, or queued anew by somebody who took this trainer for dead
            if known:
                metrics = self.held[micro_batch_id] or self._stored_metrics(micro_batch_id)
            else:
                batch = self._claimed(micro_batch_id)
                self._merge()
        if not known:
            metrics = self._compute(micro_batch_id, batch)
        with self._turn:
            self.held[micro_batch_id] = metrics
            with self._commit() as session:
                mine = queries.hold_micro_batch(session, micro_batch_id, self.settings.incarnation, metrics.to_json())
            if not mine:
                self._void()
                raise LedgerError(f"micro-batch {micro_batch_id}: its claim was lost; the accumulator was thrown away")
        return metrics.to_json()

    def prefetch(self, micro_batch_id: int) -> dict[str, Any]:
        """Runs beside every other command, on a thread of its own."""
        self._next = (micro_batch_id, self._packed(micro_batch_id))
        return {}

    def _packed(self, micro_batch_id: int) -> PackedBatch:
        with transaction(self.engine) as session:
            rows = queries.micro_batch_rows(session, micro_batch_id)
        return pack_rows(rows)

    def _stored_metrics(self, micro_batch_id: int) -> MicroBatchMetrics:
        """Of a micro-batch whose gradient came with a push."""
        with transaction(self.engine) as session:
            return MicroBatchMetrics.from_json(queries.micro_batch_row(session, micro_batch_id).metrics)

    def _claimed(self, micro_batch_id: int) -> PackedBatch:
        with transaction(self.engine) as session:
            row = queries.micro_batch_row(session, micro_batch_id)
        if row.step_id != self.step_id:
            raise CommandError(f"micro-batch {micro_batch_id} is of step row {row.step_id}; begin that step first")
        if row.state != "claimed" or row.holder != self.settings.incarnation:
            raise LedgerError(
                f"micro-batch {micro_batch_id} is {row.state} by {row.holder}, not claimed by this trainer"
            )
        if self._pushed is not None:
            raise CommandError(f"micro-batch {micro_batch_id}: the pushed gradient is not reset yet")
        ready, self._next = self._next, None
        return ready[1] if ready is not None and ready[0] == micro_batch_id else self._packed(micro_batch_id)

    def _compute(self, micro_batch_id: int, batch: PackedBatch) -> MicroBatchMetrics:
        try:
            return self.trainer.micro_batch(batch, f"micro-batch {micro_batch_id}")
        except NonFiniteError:
            with self._turn:
                self._void()  # the accumulator may hold what is not a number
            raise

    # ---- satellites -----------------------------------------------------------------------------------------------

    @_in_turn
    def push(self, step_id: int) -> dict[str, Any]:
        if self.step_id != step_id:
            raise CommandError(f"step row {step_id} is not begun; {self.step_id} is")
        if self._pushed is None and self.held:
            self._check_ledger(step_id)
            gradient = self.trainer.gradient()
            if self._gradients is None:
                self._gradients = (self._publisher({"grad": gradient}), gradient)
            else:
                self._gradients[1].copy_(gradient)
            ticket = self._gradients[0].publish(step_id)
            self._pushed = {
                "transfer": ticket.to_json(), "micro_batches": sorted(self.held),
                "cell": self.settings.cell, "epoch": self.settings.epoch,
            }  # fmt: skip
        return {"ticket": self._pushed}

    def take_push(self, step_id: int, ticket: dict[str, Any], from_incarnation: str) -> dict[str, Any] | None:
        """`absorb`, but for what has to wait for the computation; then it returns None."""
        pushed = _pushed(ticket)

        def plain() -> bool:
            return self.step_id == step_id and not self.held.keys() & set(pushed)

        with self._turn:
            if not plain():
                return None
        gradient = self._pull_push(step_id, ticket, from_incarnation)
        with self._turn:
            if not plain():
                return None
            self._take_over(step_id, ticket, from_incarnation, gradient)
        return {"micro_batches": len(pushed)}

    @_in_turn
    def absorb(self, step_id: int, ticket: dict[str, Any], from_incarnation: str) -> dict[str, Any]:
        pushed = _pushed(ticket)
        if self.step_id == step_id and (known := self.held.keys() & set(pushed)):
            with transaction(self.engine) as session:
                mine = queries.held_metrics(session, step_id, self.settings.incarnation)
            if known == set(pushed) <= mine.keys():
                return {"micro_batches": len(pushed)}
            # Somebody took this trainer for dead, and the satellite computed again what is in the accumulator.
            self._void()
            raise LedgerError(
                f"micro-batches {sorted(known)} of {from_incarnation}'s push were in central's accumulator, against "
                "the ledger; it was thrown away, and what the ledger gave central is queued again"
            )
        self.begin(step_id)
        gradient = self._pull_push(step_id, ticket, from_incarnation)
        self._take_over(step_id, ticket, from_incarnation, gradient)
        self._merge()
        return {"micro_batches": len(pushed)}

    def _pull_push(self, step_id: int, ticket: Mapping[str, Any], from_incarnation: str) -> Tensor:
        try:
            # Not kept: two buffers of a gradient's size a satellite would be dearer than the time that they would save.
            puller = open_puller(Ticket.from_json(ticket["transfer"]), self.settings.host)
            try:
                found, tensors = puller.pull()
            finally:
                puller.close()
        except TransferError as error:  # nothing was added; what the ledger says of the sender did not change either
            raise CommandError(f"{from_incarnation}'s push cannot be pulled, send it again: {error}") from error
        if found != step_id:
            raise LedgerError(f"{from_incarnation} publishes a gradient of step row {found}, not {step_id}")
        return self.trainer.checked_gradient(tensors["grad"])

    def _take_over(self, step_id: int, ticket: Mapping[str, Any], from_incarnation: str, gradient: Tensor) -> None:
        """The ledger says that the pushed micro-batches are here, and their gradient has arrived."""
        pushed = _pushed(ticket)
        if self._taken is not None and self._taken[0] == step_id:
            raise CommandError(f"step row {step_id} is taken already, and only its commit is missing")
        with self._commit() as session:
            rows = [queries.micro_batch_row(session, i) for i in pushed]
            # An earlier attempt may have committed without learning of it: then all are here, and not yet added.
            if not all(r.holder == self.settings.incarnation and r.state == "held" for r in rows):
                self._check_sender(session, ticket)
                queries.move_held(session, step_id, from_incarnation, self.settings.incarnation, pushed)
        self._arrived = gradient if self._arrived is None else self._arrived.add_(gradient)
        self.held.update(dict.fromkeys(pushed))

    def _merge(self) -> None:
        """Add what arrived to the accumulator. If that fails, nothing that is held can be counted on."""
        gradient, self._arrived = self._arrived, None
        if gradient is None:
            return
        try:
            self.trainer.absorb(gradient)
        except BaseException:
            self._void()
            raise

    @_in_turn
    def reset(self, step_id: int) -> dict[str, Any]:
        if self.step_id != step_id or not self.held:
            return {}
        with transaction(self.engine) as session:
            still = queries.held_metrics(session, step_id, self.settings.incarnation)
        if still:
            raise LedgerError(f"central has not absorbed micro-batches {sorted(still)}; their gradient stays")
        self._empty()
        return {}

    # ---- the step -------------------------------------------------------------------------------------------------

    @_in_turn
    def optimizer_step(self, step_id: int) -> dict[str, Any]:
        with transaction(self.engine) as session:
            step = queries.step_row(session, step_id)
            made = queries.weight_version(session, self.run_id, step.index + 1)
            targets = queries.step_targets(session, step_id)
        if made is not None:
            self.load(made.version)
            return {"version": made.version, "checkpoint": made.checkpoint, "metrics": step.metrics}
        if step.n_valid is None:
            raise CommandError(f"step {step.index} of {step.run_id} is {step.state}; close it first")
        if self._taken is None or self._taken[0] != step_id:
            self.begin(step_id)
            self._check_ledger(step_id)
            if self.held and not step.n_valid:
                raise CommandError(f"step {step.index} of {step.run_id} has micro-batches but no valid rollout")
            self._merge()
            by = divisor(self.settings.run.objective, step.n_valid, targets)
            self._taken = (step_id, self.trainer.optimizer_step(by if self.held else 0), None)
        result, folder = self._taken[1:]
        if folder is None:
            folder = self.trainer.save(self.settings.checkpoints, self.run_id, step_id)
            self._taken = (step_id, result, folder)
        try:
            with self._commit() as session:
                parts = queries.held_metrics(session, step_id, self.settings.incarnation)
                by = divisor(self.settings.run.objective, step.n_valid, targets)
                metrics = _step_metrics(parts, step.n_valid, by, result)
                queries.finish_step(
                    session, step_id, result.version, metrics, str(folder), holder=self.settings.incarnation
                )
        except LedgerError:
            # The step was not ours to take: go back to the version before it.
            self._taken = None
            self._void()
            self.trainer.version = None
            self.load(step.index)
            raise
        self._taken = None
        self._empty()
        self.step_id = None
        self._delete_old_checkpoints()
        return {"version": result.version, "checkpoint": str(folder), "metrics": metrics}

    def _delete_old_checkpoints(self) -> None:
        with transaction(self.engine) as session:
            stale = queries.stale_checkpoints(session, self.run_id, self.settings.run.checkpoint.keep)
            folders = [Path(row.checkpoint) for row in stale]
        checkpoint.delete_checkpoints(self.settings.checkpoints, folders)

    # ---- roles ----------------------------------------------------------------------------------------------------

    def sleep(self) -> dict[str, Any]:
        self.trainer.sleep()
        return {}

    def wake(self) -> dict[str, Any]:
        self.trainer.wake()
        return {}

    # ---- the accumulator and the ledger ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _commit(self) -> Iterator[Session]:
        """A transaction that changes something. Raises FencedError, and nothing is changed, if the cell was taken."""
        with transaction(self.engine) as session:
            queries.check_epoch(session, self.run_id, self.settings.cell, self.settings.epoch)
            yield session

    def _check_sender(self, session: Session, ticket: Mapping[str, Any]) -> None:
        """The push comes from the agent that has its cell now. Raises LedgerError."""
        try:
            queries.check_epoch(session, self.run_id, ticket["cell"], ticket["epoch"])
        except queries.FencedError as error:
            raise LedgerError(f"the push of cell {ticket['cell']!r} is void: {error}") from error

    def _check_ledger(self, step_id: int) -> None:
        with transaction(self.engine) as session:
            ledger = queries.held_metrics(session, step_id, self.settings.incarnation)
        if ledger.keys() != self.held.keys():
            here, there = sorted(self.held), sorted(ledger)
            self._void()
            raise LedgerError(
                f"the accumulator holds micro-batches {here}, the ledger says {there}; it was thrown away, and what "
                "the ledger gave this trainer is queued again"
            )

    def _leave_step(self, reason: str) -> None:
        """Forget the accumulator, unless the ledger still counts on it."""
        if self.step_id is not None and self.held:
            with transaction(self.engine) as session:
                ledger = queries.held_metrics(session, self.step_id, self.settings.incarnation)
            if ledger:
                raise CommandError(
                    f"cannot {reason}: the gradient of micro-batches {sorted(ledger)} of step row {self.step_id} is "
                    "here; push it or finish the step first"
                )
        self._empty()
        self.step_id = None

    def _void(self) -> None:
        """Throw the accumulator away and queue its micro-batches again: a trainer that was replaced may do so, too."""
        if self.step_id is not None:
            with transaction(self.engine) as session:
                queries.requeue_holder(session, self.step_id, self.settings.incarnation)
        self._empty()

    def _empty(self) -> None:
        self.trainer.begin()
        self._arrived = None
        self.held.clear()
        self._pushed = None


def _pushed(ticket: Mapping[str, Any]) -> list[int]:
    """Micro-batches of a push."""
    return [int(i) for i in ticket["micro_batches"]]


def _megatron(settings: ReplicaSettings) -> Trainer:
    from gyre.training.ranks import open_trainer  # here: Megatron takes seconds to import

    return open_trainer(settings.run, settings.cell)


def _step_metrics(parts: Mapping[int, dict[str, Any]], n_valid: int, by: int, result: StepResult) -> dict[str, Any]:
    whole = combine(MicroBatchMetrics.from_json(p) for p in parts.values())
    return {
        **whole.to_json(),
        "loss": whole.loss / max(by, 1),
        "micro_batches": len(parts),
        "n_valid": n_valid,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "weights_changed": bool(parts),
        "torch_threads": torch.get_num_threads(),
    }
