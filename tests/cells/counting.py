"""Replicas whose trainers count instead of computing, so that what a step trained can be read off exactly.

The replica, its ledger and its fence are the real ones, over a real Postgres; the transfer goes through a dictionary.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from torch import Tensor

from gyre.store import queries as q
from gyre.store.db import transaction
from gyre.training import replica as module
from gyre.training.batch import PackedBatch
from gyre.training.metrics import MicroBatchMetrics
from gyre.training.outcome import StepResult
from gyre.training.replica import Replica, ReplicaSettings
from gyre.transfer import CorruptTransfer, PublisherGone, Ticket
from tests.training.world import World

Fault = Literal["before", "inside", "after", "kill-before", "kill-inside", "kill-after", "corrupt"]
"""What happens at the next transaction or transfer: the database does not answer before it, in it, or after its
commit; the process is killed there; the bytes that arrive are not those that were sent."""


class Killed(BaseException):
    """kill -9: nothing of the process is left but what it committed."""


class CountingTrainer:
    """Its gradient says how often each micro-batch is in it."""

    def __init__(self, faults: Faults, size: int) -> None:
        self.faults, self.size = faults, size
        self.version: int | None = None
        self.asleep = False
        self.sum = torch.zeros(size)
        self.stepped = torch.zeros(size)
        self.meanwhile: Callable[[], None] = lambda: None
        """What another thread does while a micro-batch is computed."""

    def load(self, version: int, source: Path | Mapping[str, Tensor]) -> None:
        self.version = version
        self.begin()

    def begin(self) -> None:
        self.sum = torch.zeros(self.size)

    def micro_batch(self, batch: PackedBatch, name: str) -> MicroBatchMetrics:
        self.faults.strike("compute")
        self.meanwhile()
        self.sum[int(name.removeprefix("micro-batch ")) % self.size] += 1
        return MicroBatchMetrics(n_targets=1)

    def gradient(self) -> Tensor:
        return self.sum.clone()

    def checked_gradient(self, gradient: Tensor) -> Tensor:
        return gradient

    def absorb(self, gradient: Tensor) -> None:
        self.faults.strike("absorb")
        self.sum += gradient

    def optimizer_step(self, divisor: int) -> StepResult:
        self.stepped = self.sum.clone()
        self.version = (self.version or 0) + 1
        self.begin()
        return StepResult(self.version, 0.0, 0.0)

    def export_hf(self) -> dict[str, Tensor]:
        return {"w": torch.zeros(1)}

    def save(self, root: Path, run_id: str, step_id: int | None) -> Path:
        self.faults.strike("save")
        folder = root / f"v{self.version}-{len(self.faults.saved)}"
        self.faults.saved[str(folder)] = self.stepped
        return folder

    def sleep(self) -> None:
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False


@dataclass
class Faults:
    """The fault that waits for its place, what is published, and what was saved: checkpoint folder -> its gradient."""

    next: list[Fault] = field(default_factory=list)
    published: dict[str, tuple[int, dict[str, Tensor]]] = field(default_factory=dict)
    saved: dict[str, Tensor] = field(default_factory=dict)

    def strike(self, where: str) -> None:
        """Outside of transactions only a kill strikes."""
        if self.next and self.next[0] == "kill-before":
            self.next.pop(0)
            raise Killed(where)

    @contextmanager
    def transaction(self, engine: Engine) -> Iterator[Session]:
        fault = self.next.pop(0) if self.next and self.next[0] != "corrupt" else None
        error: BaseException = Killed() if fault and "kill" in fault else OperationalError("", {}, Exception("lost"))
        if fault in ("before", "kill-before"):
            raise error
        with transaction(engine) as session:
            yield session
            if fault in ("inside", "kill-inside"):
                raise error
        if fault in ("after", "kill-after"):
            raise error

    def publisher(self, tensors: Mapping[str, Tensor], backend: str, host: str) -> Publisher:
        return Publisher(self, tensors)

    def puller(self, ticket: Ticket, host: str) -> Puller:
        return Puller(self, ticket)


@dataclass
class Publisher:
    faults: Faults
    tensors: Mapping[str, Tensor]
    address: str = field(default_factory=lambda: uuid.uuid4().hex)

    def publish(self, version: int) -> Ticket:
        self.faults.published[self.address] = version, {n: t.clone() for n, t in self.tensors.items()}
        return Ticket("socket", self.address, 0, version)

    def close(self) -> None:
        self.faults.published.pop(self.address, None)


@dataclass
class Puller:
    faults: Faults
    ticket: Ticket

    def pull(self) -> tuple[int, dict[str, Tensor]]:
        if self.faults.next and self.faults.next[0] == "corrupt":
            self.faults.next.pop(0)
            raise CorruptTransfer("CRC-32 does not match")
        if self.ticket.address not in self.faults.published:
            raise PublisherGone("publisher is gone")
        version, tensors = self.faults.published[self.ticket.address]
        return version, {n: t.clone() for n, t in tensors.items()}

    def close(self) -> None:
        return None


@dataclass(eq=False)
class Agent:
    """An agent with its trainer, as far as the ledger sees it. `alive`: not killed; it may have been replaced."""

    cluster: Cluster
    cell: str
    central: bool
    epoch: int
    replica: Replica
    ticket: dict[str, Any] | None = None
    step_id: int | None = None
    alive: bool = True

    @property
    def incarnation(self) -> str:
        return self.replica.settings.incarnation

    def prepare(self, step_id: int, index: int) -> bool:
        if self.replica.version != index:
            self.replica.load(index)
        self.replica.begin(step_id)
        self.step_id = step_id
        return True

    def work(self, step_id: int) -> bool:
        """Claim and compute one micro-batch."""
        with self.cluster.faults.transaction(self.cluster.world.engine) as s:
            q.check_epoch(s, self.replica.run_id, self.cell, self.epoch)
            found = q.claim_micro_batch(s, step_id, self.cell, self.incarnation)
        if found is not None:
            self.replica.micro_batch(found)
        return found is not None

    def push(self, step_id: int) -> None:
        self.ticket = self.replica.push(step_id)["ticket"]

    def absorb_from(self, sender: Agent, step_id: int) -> None:
        """As the trainer's service does."""
        if sender.ticket is not None and self.take_from(sender, step_id) is None:
            self.replica.absorb(step_id, sender.ticket, sender.incarnation)

    def take_from(self, sender: Agent, step_id: int) -> dict[str, Any] | None:
        """As it does while a micro-batch is computed, up to where that is waited for."""
        return None if sender.ticket is None else self.replica.take_push(step_id, sender.ticket, sender.incarnation)

    @property
    def trainer(self) -> CountingTrainer:
        return cast(CountingTrainer, self.replica.trainer)

    def step(self, step_id: int) -> None:
        self.replica.publish(int(self.replica.optimizer_step(step_id)["version"]))


class Cluster:
    """A central cell and satellites; each cell has one agent that counts, and may have zombies."""

    def __init__(self, world: World, faults: Faults, checkpoints: Path, satellites: int = 2, size: int = 6) -> None:
        self.world, self.faults, self.checkpoints, self.size = world, faults, checkpoints, size
        self.names = ["alpha", *(f"sat{i}" for i in range(satellites))]
        self.agents: dict[str, Agent] = {}
        self.zombies: list[Agent] = []
        self.lives = 0
        for name in self.names:
            self.start(name)

    def start(self, cell: str) -> Agent:
        """A new agent takes the cell; the one before, if it lives, becomes a zombie."""
        before = self.agents.get(cell)
        if before is not None and before.alive and before not in self.zombies:
            self.zombies.append(before)
        run, central = self.world.config.run_id, cell == "alpha"
        with transaction(self.world.engine) as s:
            epoch = q.take_cell(s, run, cell, central=central, max_running=1)
        self.lives += 1
        settings = ReplicaSettings(self.world.config, cell, central, self.checkpoints, f"{cell}-{self.lives}", epoch)
        replica = Replica(settings, self.world.engine, cast(Any, CountingTrainer(self.faults, self.size)))
        replica.start()
        self.agents[cell] = Agent(self, cell, central, epoch, replica)
        with transaction(self.world.engine) as s:
            q.upsert_cell(s, run, cell, trainer_incarnation=settings.incarnation)
        return self.agents[cell]

    def kill(self, agent: Agent) -> None:
        """Its memory, and what it published, are gone."""
        agent.alive = False
        for held in (agent.replica._weights, agent.replica._gradients):
            if held is not None:
                held[0].close()

    def requeue(self, step_id: int, doubted: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        """What somebody does who looks for dead holders; `doubted` cells are silent, and taken for dead."""
        with transaction(self.world.engine) as s:
            living = q.living_trainers(s, self.world.config.run_id, 3600)
            living -= {self.agents[cell].incarnation for cell in doubted}
            q.requeue_lost(s, step_id, living)


def use(monkeypatch: pytest.MonkeyPatch, faults: Faults) -> None:
    """Have replicas strike `faults` at their transactions, and transfer through it."""
    monkeypatch.setattr(module, "transaction", faults.transaction)
    monkeypatch.setattr(module, "open_publisher", faults.publisher)
    monkeypatch.setattr(module, "open_puller", faults.puller)
    monkeypatch.setattr(module, "pack_rows", lambda rows: rows)
    monkeypatch.setattr(module.checkpoint, "clean", lambda *_: None)
    monkeypatch.setattr(module.checkpoint, "delete_checkpoints", lambda *_: None)
    monkeypatch.setattr(module, "read_hf_weights", lambda folder: {})
