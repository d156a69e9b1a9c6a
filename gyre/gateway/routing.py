"""Which cell generates for a call: prefix affinity, then load; bounded admission, fair among rollouts."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from gyre.store.gateway_queries import CellRow

# Seconds that a cell is left alone after a failure: the first, doubled at each further one, at most the last.
BACKOFF_S = (0.25, 4.0)


@dataclass(slots=True, eq=False)
class Lease:
    """The right to run one request on a cell. `revoked` is set when the cell stops serving."""

    cell: str
    url: str
    version: int
    revoked: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Cell:
    row: CellRow
    leases: set[Lease] = field(default_factory=set)
    failures: int = 0
    suspect_until: float = 0.0


@dataclass(slots=True, eq=False)
class _Waiter:
    granted: asyncio.Future[Lease]
    min_version: int
    preferred: str | None


class Router:
    """The cells of one run, who runs on them, and who waits."""

    def __init__(self) -> None:
        self._cells: dict[str, _Cell] = {}
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()

    def apply(self, rows: Iterable[CellRow]) -> None:
        """Take over the table's newest rows. Leases on a cell that no longer serves as it did are revoked."""
        seen: set[str] = set()
        for row in rows:
            seen.add(row.name)
            cell = self._cells.setdefault(row.name, _Cell(row))
            old, cell.row = cell.row, row
            another = (old.engine_url, old.engine_incarnation) != (row.engine_url, row.engine_incarnation)
            if another or (row.routable and not old.routable):
                cell.failures, cell.suspect_until = 0, 0.0
            if another or not row.routable:
                self._revoke(cell)
        for name in self._cells.keys() - seen:
            self._revoke(self._cells.pop(name))
        self.dispatch()

    @staticmethod
    def _revoke(cell: _Cell) -> None:
        for lease in cell.leases:
            lease.revoked.set()

    async def acquire(self, rollout_id: str, min_version: int, preferred: str | None) -> Lease:
        """A lease on a cell that serves at least `min_version`; waits as long as there is none.

        `preferred` is the cell that holds the call's prefix. Waiting rollouts take turns, first come first served
        within each.
        """
        waiter = _Waiter(asyncio.get_running_loop().create_future(), min_version, preferred)
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
        if cell is not None:
            cell.leases.discard(lease)
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
        """The cell finished an answer: its failures are forgotten."""
        if (cell := self._cells.get(lease.cell)) is not None:
            cell.failures = 0

    def dispatch(self) -> None:
        """Grant what can be granted, one call a rollout at a time."""
        granted = True
        while granted and self._waiting:
            granted = False
            for rollout_id in list(self._waiting):
                queue = self._waiting[rollout_id]
                if queue[0].granted.done():  # cancelled, and its task has not had its turn yet
                    queue.popleft()
                    granted = True
                elif (lease := self._choose(queue[0])) is not None:
                    queue.popleft().granted.set_result(lease)
                    granted = True
                else:
                    continue
                if queue:
                    self._waiting.move_to_end(rollout_id)
                else:
                    del self._waiting[rollout_id]

    def _choose(self, waiter: _Waiter) -> Lease | None:
        now = asyncio.get_running_loop().time()
        free = [
            cell
            for cell in self._cells.values()
            if cell.row.routable
            and cell.row.engine_url is not None
            and cell.row.serving_version is not None
            and cell.row.serving_version >= waiter.min_version
            and len(cell.leases) < cell.row.max_running
            and cell.suspect_until <= now
        ]
        if not free:
            return None
        least = min(free, key=lambda c: len(c.leases) / c.row.max_running)
        for cell in free:
            # A prefix in cache is worth a few places in the batch, not a queue.
            if cell.row.name == waiter.preferred and len(cell.leases) <= len(least.leases) + 4:
                least = cell
        assert least.row.engine_url is not None and least.row.serving_version is not None
        lease = Lease(least.row.name, least.row.engine_url, least.row.serving_version)
        least.leases.add(lease)
        return lease

    def view(self) -> list[dict[str, object]]:
        """The cells as an operator may see them."""
        now = asyncio.get_running_loop().time()
        return [
            {
                "name": c.row.name,
                "url": c.row.engine_url,
                "routable": c.row.routable,
                "version": c.row.serving_version,
                "running": len(c.leases),
                "max_running": c.row.max_running,
                "suspect_s": round(max(0.0, c.suspect_until - now), 2),
            }
            for c in self._cells.values()
        ]

    @property
    def waiting(self) -> int:
        """Calls that wait for a cell."""
        return sum(len(q) for q in self._waiting.values())
