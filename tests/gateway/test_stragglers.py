"""The tail of a step: few rollouts are left, and cells come and go under them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.gateway.routing import AFFINITY_PLACES, Lease, Router
from gyre.store.gateway_queries import CellRow

SLOTS = 16
NEIGHBOURS = AFFINITY_PLACES + 1  # whoever asks does not count itself


def row(name: str, *, routable: bool = True) -> CellRow:
    return CellRow(name, f"http://{name}", routable, 0, SLOTS, "i")


class Tail:
    """Rollouts that each make one call after the other, and prefer the cell that has their prefix."""

    def __init__(self, router: Router, stragglers: int) -> None:
        self.router = router
        self.at: dict[str, Lease | None] = {f"r{i}": None for i in range(stragglers)}
        self.moves = 0

    async def turn(self) -> None:
        """Every rollout ends its call and makes the next one."""
        for name, lease in self.at.items():
            if lease is not None:
                self.router.release(lease)
            self.at[name] = new = await self.router.acquire(name, 0, None if lease is None else lease.cell)
            self.moves += lease is not None and new.cell != lease.cell

    def loads(self) -> Counter[str]:
        return Counter(lease.cell for lease in self.at.values() if lease is not None)


async def test_stragglers_move_to_a_cell_that_came_back_and_then_stay() -> None:
    router = Router()
    router.apply([row("central", routable=False), row("satellite")])
    tail = Tail(router, 10)
    await tail.turn()
    assert tail.loads() == {"satellite": 10}
    router.apply([row("central"), row("satellite")])
    await tail.turn()
    loads = tail.loads()
    assert loads["central"] >= 3 and loads["satellite"] - loads["central"] <= NEIGHBOURS
    moved = tail.moves
    for _ in range(5):
        await tail.turn()
    assert tail.moves == moved, "who has a cell with a few more neighbours keeps his prefix"


async def test_a_few_stragglers_stay_with_their_prefixes() -> None:
    router = Router()
    router.apply([row("a", routable=False), row("b")])
    tail = Tail(router, AFFINITY_PLACES)
    await tail.turn()
    router.apply([row("a"), row("b")])
    for _ in range(3):
        await tail.turn()
    assert tail.loads() == {"b": AFFINITY_PLACES} and tail.moves == 0


async def test_central_serves_like_any_other_cell() -> None:
    """It takes what the satellite leaves behind, whatever their calls preferred."""
    router = Router()
    router.apply([row("central"), row("satellite")])
    tail = Tail(router, 6)
    await tail.turn()
    assert tail.loads() == {"central": 3, "satellite": 3}
    router.apply([row("central"), row("satellite", routable=False)])
    revoked = {lease.cell for lease in tail.at.values() if lease is not None and lease.revoked.is_set()}
    assert revoked == {"satellite"}
    await tail.turn()
    assert tail.loads() == {"central": 6}


@settings(max_examples=100, deadline=None)
@given(stragglers=st.integers(1, SLOTS), cells=st.integers(2, 5))
async def test_what_comes_back_empties_the_fullest_and_nothing_wavers(stragglers: int, cells: int) -> None:
    names = [f"c{i}" for i in range(cells)]
    router = Router()
    router.apply([row(n, routable=n == "c0") for n in names])
    tail = Tail(router, stragglers)
    await tail.turn()
    router.apply([row(n) for n in names])
    for _ in range(3):
        await tail.turn()
    loads = [tail.loads()[n] for n in names]
    assert max(loads) - min(loads) <= NEIGHBOURS
    moved = tail.moves
    await tail.turn()
    assert tail.moves == moved
