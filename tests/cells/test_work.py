"""Training between two cells when answers are lost: a scripted trainer stands where timing cannot be arranged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest

from activities.cell_site import CellSite
from activities.cell_store import OpenStep
from activities.cell_work import Work, push_held
from gyre.store import queries as q
from gyre.store.queries import StepProgress
from gyre.training.protocol import TrainerError, TrainerStatus, TrainerUnavailable


@dataclass
class Script:
    """A satellite's site, its trainer and central's at once. `central_says` is what an absorb raises."""

    held: int = 4
    pushed: bool = False
    still_in_ledger: bool = False
    central_says: Exception | None = None
    queued: int = 0
    sent: list[str] = field(default_factory=list)
    central: bool = False
    name: str = "c1"
    incarnation: str = "me"
    at: str = "central's socket"

    @property
    def store(self) -> Script:
        return self

    trainer = client = store

    async def central_trainer(self) -> Script:
        return self

    async def status(self) -> TrainerStatus:
        return TrainerStatus("me", 0, 7, self.held, self.pushed, False, None, 0)

    async def open_step(self) -> OpenStep:
        return OpenStep(7, 0, StepProgress("open", self.queued, 0, {"me": self.held}, 0, 0, 1))

    async def do(self, claim: Callable[..., Any]) -> int | None:
        if isinstance(claim, partial) and claim.func is q.claim_ahead:
            return None
        self.sent.append("claim")
        return 42

    async def requeue_lost(self, step_id: int, mine: str) -> None:
        return None

    async def push(self, step_id: int) -> dict[str, Any]:
        self.sent.append("push")
        self.pushed = True
        return {"micro_batches": [1]}

    async def absorb(self, step_id: int, ticket: dict[str, Any], incarnation: str) -> None:
        self.sent.append("absorb")
        if self.central_says is not None:
            raise self.central_says

    async def reset(self, step_id: int) -> None:
        self.sent.append("reset")
        if self.still_in_ledger:
            raise TrainerError("LedgerError", "central has not absorbed micro-batches [1]; their gradient stays")
        self.held, self.pushed = 0, False

    async def micro_batch(self, number: int) -> dict[str, Any]:
        self.sent.append("micro_batch")
        if self.pushed:
            raise TrainerError("CommandError", "the pushed gradient is not reset yet")
        return {"tokens": 1}

    @property
    def site(self) -> CellSite:
        return cast(CellSite, self)


async def test_an_unanswered_push_comes_before_new_work() -> None:
    """Central dies during an absorb, and with it what it held: the queue fills while the satellite's push is out."""
    script = Script(central_says=TrainerUnavailable("central is gone"))
    work = Work(script.site)
    with pytest.raises(TrainerUnavailable):
        await work._once()
    script.queued, script.central_says = 2, None  # central is back, its micro-batches are queued again
    assert await work._once()
    assert await work._once()
    assert script.sent == ["push", "absorb", "push", "absorb", "reset", "claim", "micro_batch"]
    assert work.micro_batches == 1


async def test_a_push_that_arrived_before_is_forgotten_when_its_step_is_done() -> None:
    script = Script(central_says=TrainerError("CommandError", "step 0 of run is done"))
    assert await push_held(script.site)
    assert script.sent == ["push", "absorb", "reset"] and not script.held


async def test_a_refused_push_stays_as_long_as_the_ledger_counts_on_it() -> None:
    script = Script(central_says=TrainerError("CommandError", "step 0 trains version 0, but 1 is loaded"))
    script.still_in_ledger = True
    with pytest.raises(TrainerError, match=r"has not absorbed .*; central had refused it: step 0 trains version 0"):
        await push_held(script.site)
    assert script.held == 4


async def test_what_breaks_on_the_way_to_central_is_no_refusal() -> None:
    script = Script(central_says=TrainerError("PublisherGone", "publisher at 127.0.0.1:1 is gone"))
    with pytest.raises(TrainerError, match="PublisherGone"):
        await push_held(script.site)
    assert script.sent == ["push", "absorb"]
