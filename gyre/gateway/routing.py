"""Which cell generates for a call: prefix affinity, load and room in the KV cache; bounded admission, fair to all.

A cell takes at most `max_running` calls, and only calls whose prompts and longest answers fit its KV cache together; a
call that fits no cell even alone is taken by an empty one. Of the calls that wait, those of the rollouts with the
fewest calls running come first; a rollout's own calls come in order. A call that was passed over `PATIENCE` times,
because others fitted where it did not, has a cell kept free for it until it fits: long prompts do not starve.

A cell that failed is left alone for a while. Then one call tries it, and the others wait until a token has come, or go
elsewhere: an engine that takes requests and is silent (its network drops packets) costs one call its time, not all.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from gyre.store.gateway_queries import CellRow

# Calls that may be let in before one that waits for room, until a cell is kept free for it.
PATIENCE = 8
# Places in the batch that a prefix in cache is worth, at least: a prompt that is computed anew costs more than that.
AFFINITY_PLACES = 4
# Seconds that a cell is left alone after a failure: the first, doubled at each further one, at most the last.
BACKOFF_S = (0.25, 4.0)


@dataclass(slots=True, eq=False)
class Lease:
    """The right to run one request on a cell. `revoked` is set when the cell stops serving."""

    cell: str
    url: str
    version: int
    rollout_id: str = ""
    tokens: int = 0
    """Its prompt and its longest answer."""
    revoked: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Cell:
    row: CellRow
    leases: set[Lease] = field(default_factory=set)
    tokens: int = 0
    failures: int = 0
    suspect_until: float = 0.0
    trial: Lease | None = None
    """Of the call that tries it after a failure."""

    def serves(self, min_version: int) -> bool:
        row = self.row
        return (
            row.routable
            and row.admits
            and row.engine_url is not None
            and row.serving_version is not None
            and row.serving_version >= min_version
        )

    def fits(self, tokens: int) -> bool:
        if len(self.leases) >= self.row.max_running or self.trial is not None:
            return False
        return not self.leases or self.row.kv_tokens is None or self.tokens + tokens <= self.row.kv_tokens

    def cost(self, waiter: _Waiter) -> float:
        """How full it is, and how much of it the prompt would take anew."""
        load = len(self.leases) / self.row.max_running
        if self.row.kv_tokens is not None:
            load = max(load, self.tokens / self.row.kv_tokens)
        if self.row.name == waiter.preferred:
            worth = AFFINITY_PLACES / self.row.max_running
            if self.row.kv_tokens is not None:
                worth = max(worth, waiter.tokens / self.row.kv_tokens)
            load -= worth
        return load


@dataclass(slots=True, eq=False)
class _Waiter:
    granted: asyncio.Future[Lease]
    rollout_id: str
    min_version: int
    preferred: str | None
    tokens: int
    passed: int = 0
    """Calls of others that were let in while it waited for room."""


class Router:
    """The cells of one run, who runs on them, and who waits.

    Of `shards` gateway processes each takes its part of a cell: what they admit together fits it, but for rounding.
    """

    def __init__(self, shards: int = 1) -> None:
        self._shards = shards
        self._cells: dict[str, _Cell] = {}
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()
        self._running: Counter[str] = Counter()
        """Leases by rollout."""

    def apply(self, rows: Iterable[CellRow]) -> None:
        """Take over the table's newest rows. Leases on a cell that no longer serves as it did are revoked."""
        seen: set[str] = set()
        for whole in rows:
            row = self._part(whole)
            seen.add(row.name)
            cell = self._cells.setdefault(row.name, _Cell(row))
            old, cell.row = cell.row, row
            another = (old.engine_url, old.engine_incarnation) != (row.engine_url, row.engine_incarnation)
            if another or (row.routable and not old.routable):
                cell.failures, cell.suspect_until, cell.trial = 0, 0.0, None
            if another or not row.routable:
                self._revoke(cell)
        for name in self._cells.keys() - seen:
            self._revoke(self._cells.pop(name))
        self.dispatch()

    def _part(self, row: CellRow) -> CellRow:
        """This process's part of a cell."""
        if self._shards == 1:
            return row
        tokens = None if row.kv_tokens is None else row.kv_tokens // self._shards
        return replace(row, max_running=-(-row.max_running // self._shards), kv_tokens=tokens)

    @staticmethod
    def _revoke(cell: _Cell) -> None:
        for lease in cell.leases:
            lease.revoked.set()

    async def acquire(self, rollout_id: str, min_version: int, preferred: str | None, *, tokens: int = 0) -> Lease:
        """A lease on a cell that serves at least `min_version`; waits as long as there is none.

        `preferred` is the cell that holds the call's prefix, `tokens` its prompt and its longest answer. Waiting
        rollouts take turns, first come first served within each.
        """
        waiter = _Waiter(asyncio.get_running_loop().create_future(), rollout_id, min_version, preferred, tokens)
        self._waiting.setdefault(rollout_id, deque()).append(waiter)
        self.dispatch()
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled():
                self.release(waiter.granted.result())
            elif (queue := self._waiting.get(rollout_id)) is not None and waiter in queue:
                queue.remove(waiter)
                if not queue:
                    del self._waiting[rollout_id]
            raise

    def release(self, lease: Lease) -> None:
        """Give a lease back."""
        cell = self._cells.get(lease.cell)
        if cell is not None and lease in cell.leases:
            cell.leases.discard(lease)
            cell.tokens -= lease.tokens
            if cell.trial is lease:
                cell.trial = None
        self._running[lease.rollout_id] -= 1
        if not self._running[lease.rollout_id]:
            del self._running[lease.rollout_id]
        self.dispatch()

    def failed(self, lease: Lease) -> float:
        """The cell failed under this lease: leave it alone for a while. Returns the seconds."""
        cell = self._cells.get(lease.cell)
        if cell is None or lease.revoked.is_set():
            return 0.0
        now = asyncio.get_running_loop().time()
        if cell.suspect_until > now:
            return cell.suspect_until - now
        pause: float = min(BACKOFF_S[0] * 2.0**cell.failures, BACKOFF_S[1])
        cell.failures += 1
        cell.suspect_until = now + pause
        asyncio.get_running_loop().call_later(pause + 0.001, self.dispatch)
        return pause

    def succeeded(self, lease: Lease) -> None:
        """The cell gives tokens: its failures are forgotten."""
        cell = self._cells.get(lease.cell)
        if cell is not None and cell.failures and lease in cell.leases and not lease.revoked.is_set():
            cell.failures, cell.trial = 0, None
            self.dispatch()

    def dispatch(self) -> None:
        """Grant what can be granted, one call a rollout at a time."""
        while self._waiting and self._grant_one():
            pass

    def _grant_one(self) -> bool:
        """Let in the first call, in order of fairness, that a cell has room for. False where there is none."""
        now = asyncio.get_running_loop().time()
        open_cells = [c for c in self._cells.values() if c.suspect_until <= now]
        if not any(len(c.leases) < c.row.max_running for c in open_cells):
            return False
        # Stable: among equals, who has waited longest since the rollout's last turn.
        order = sorted(self._waiting, key=lambda r: self._running[r])
        heads = [self._waiting[r][0] for r in order]
        kept: set[str] = set()
        starving = sorted((w for w in heads if w.passed >= PATIENCE), key=lambda w: -w.passed)
        skipped: list[_Waiter] = []
        for waiter in [*starving, *(w for w in heads if w.passed < PATIENCE)]:
            if waiter.granted.done():  # cancelled, and its task has not had its turn yet
                self._take(waiter)
                return True
            able = [c for c in open_cells if c.serves(waiter.min_version) and c.row.name not in kept]
            free = [c for c in able if c.fits(waiter.tokens)]
            if free:
                for other in skipped:
                    other.passed += 1
                self._take(waiter)
                waiter.granted.set_result(self._lease(min(free, key=lambda c: c.cost(waiter)), waiter))
                return True
            if able:
                skipped.append(waiter)
                if waiter.passed >= PATIENCE:  # what runs there ends, and nothing else begins
                    kept.add(min(able, key=lambda c: c.tokens).row.name)
        return False

    def _take(self, waiter: _Waiter) -> None:
        queue = self._waiting[waiter.rollout_id]
        queue.popleft()
        if queue:
            self._waiting.move_to_end(waiter.rollout_id)
        else:
            del self._waiting[waiter.rollout_id]

    def _lease(self, cell: _Cell, waiter: _Waiter) -> Lease:
        assert cell.row.engine_url is not None and cell.row.serving_version is not None
        lease = Lease(cell.row.name, cell.row.engine_url, cell.row.serving_version, waiter.rollout_id, waiter.tokens)
        cell.leases.add(lease)
        if cell.failures:
            cell.trial = lease
        cell.tokens += lease.tokens
        self._running[waiter.rollout_id] += 1
        return lease

    def view(self) -> list[dict[str, object]]:
        """The cells as an operator may see them."""
        now = asyncio.get_running_loop().time()
        return [
            {
                "name": c.row.name,
                "url": c.row.engine_url,
                "routable": c.row.routable,
                "admits": c.row.admits,
                "version": c.row.serving_version,
                "running": len(c.leases),
                "max_running": c.row.max_running,
                "tokens": c.tokens,
                "kv_tokens": c.row.kv_tokens,
                "suspect_s": round(max(0.0, c.suspect_until - now), 2),
            }
            for c in self._cells.values()
        ]

    @property
    def waiting(self) -> int:
        """Calls that wait for a cell."""
        return sum(len(q) for q in self._waiting.values())
