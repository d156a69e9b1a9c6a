"""The time that a paced engine takes: one batch whose members all decode at its speed, by a cost model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gyre.simulation.model import CostModel


@dataclass(eq=False)
class Work:
    """One request in the batch. `due` are the tokens at which `reached` is called, in order; the last is the end."""

    due: list[int]
    reached: Callable[[int], None]
    prefill_s: float
    done: float = 0.0
    """Tokens decoded."""


@dataclass
class Batch:
    """Decodes: with b members decoding, each gets a token every `cost.token_s(b)` seconds. Members prefill first,
    beside those that decode."""

    cost: CostModel
    clock: Callable[[], float] = time.monotonic
    decoding: list[Work] = field(default_factory=list)
    _prefilling: dict[Work, asyncio.TimerHandle] = field(default_factory=dict)
    _waiting: list[Work] = field(default_factory=list)
    _timer: asyncio.TimerHandle | None = None
    _at: float = 0.0
    _paused: bool = False

    @property
    def running(self) -> int:
        return len(self.decoding) + len(self._prefilling)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, work: Work) -> None:
        """A new request; it waits while the batch is full."""
        self._waiting.append(work)
        self._admit()

    def remove(self, work: Work) -> None:
        """Whatever became of it."""
        self._advance()
        if work in self._waiting:
            self._waiting.remove(work)
        elif (timer := self._prefilling.pop(work, None)) is not None:
            timer.cancel()
        elif work in self.decoding:
            self.decoding.remove(work)
        self._admit()
        self._foresee()

    def tokens(self, work: Work) -> int:
        """Whole tokens that it has by now."""
        self._advance()
        return min(int(work.done + 1e-6), work.due[-1] if work.due else int(work.done + 1e-6))

    def pause(self) -> None:
        """Time stands still."""
        self._advance()
        self._paused = True
        self._foresee()

    def resume(self) -> None:
        """Time goes on."""
        self._at, self._paused = self.clock(), False
        self._admit()
        self._foresee()

    def _admit(self) -> None:
        while self._waiting and self.running < self.cost.slots and not self._paused:
            work = self._waiting.pop(0)
            loop = asyncio.get_running_loop()
            self._prefilling[work] = loop.call_later(work.prefill_s, self._decode, work)

    def _decode(self, work: Work) -> None:
        del self._prefilling[work]
        self._advance()
        self.decoding.append(work)
        self._foresee()

    def _advance(self) -> None:
        now = self.clock()
        if self.decoding and not self._paused:
            tokens = (now - self._at) / self.cost.token_s(len(self.decoding))
            for work in self.decoding:
                work.done += tokens
        self._at = now

    def _foresee(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.decoding and not self._paused:
            left = min(work.due[0] - work.done for work in self.decoding)
            after = max(0.0, left) * self.cost.token_s(len(self.decoding))
            self._timer = asyncio.get_running_loop().call_later(after, self._reach)

    def _reach(self) -> None:
        self._timer = None
        self._advance()
        for work in list(self.decoding):
            while work.due and work.due[0] <= work.done + 1e-6:
                due = work.due.pop(0)
                if not work.due:
                    self.decoding.remove(work)
                work.reached(due)
        self._admit()
        self._foresee()
