"""A cell on another machine whose network carries nothing for a while: its calls go on elsewhere, and come back."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest

from gyre import ports
from tests.cells.machines import Machines, two_machines_or_skip
from tests.gateway.conftest import World
from tests.gateway.stand_in import StandIn
from tests.gateway.test_silence import ALPHABET, ASK, ask, seamless

ENGINE = """
import asyncio, signal, sys
from tests.gateway.stand_in import StandIn
async def main():
    async with StandIn(sys.argv[1]) as engine:
        engine.text, engine.hold_after = sys.argv[2], 7
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, setattr, engine, "hold_after", None)
        print(engine.url, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture
def machines() -> Iterator[Machines]:
    with two_machines_or_skip() as found:
        yield found


@dataclass
class Remote:
    """An engine on the other machine, as cell c0. It ends no answer before `go_on`."""

    world: World
    machines: Machines
    engine: asyncio.subprocess.Process

    def view(self, what: str) -> float:
        """What the gateway knows of it."""
        [found] = [cell[what] for cell in self.world.served.gateway.router.view() if cell["name"] == "c0"]
        return float(str(found))

    def go_on(self) -> None:
        self.engine.send_signal(signal.SIGUSR1)


@pytest.fixture
async def remote(world: World, machines: Machines, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Remote]:
    monkeypatch.setattr(ports, "LOST_S", 5)
    argv = [*machines.prefix, sys.executable, "-c", ENGINE, machines.there, ALPHABET]
    engine = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
    assert engine.stdout is not None
    url = (await engine.stdout.readline()).decode().strip()
    world.cell("c0", engine_url=url, engine_incarnation="a", max_running=2)
    await world.until(lambda: len(world.served.gateway.router.view()) == 1)
    yield Remote(world, machines, engine)
    engine.kill()
    await engine.wait()


async def test_calls_of_a_cell_behind_a_dead_link_go_on_elsewhere_and_it_serves_again(remote: Remote) -> None:
    world, gateway = remote.world, remote.world.served.gateway
    assert gateway.calls.engines.silence_s >= 60, "it is not the engine's silence that is noticed here"
    live = [asyncio.create_task(ask(world, member)) for member in (0, 1)]
    await world.until(lambda: remote.view("running") == 2)
    remote.machines.cut()
    async with StandIn() as other:
        other.text = ALPHABET
        world.cell("c1", engine_url=other.url, engine_incarnation="b", max_running=2)
        assert await asyncio.gather(*live) == [ALPHABET] * 2
        # Nobody has said of c0 that it is gone, so it is tried again and again: by one call at a time.
        await world.until(lambda: remote.view("suspect_s") == 0)
        more = [asyncio.create_task(ask(world, 2, [*ASK, {"role": "user", "content": f"{n}"}])) for n in range(8)]
        tries = {remote.view("running")}
        while not all(call.done() for call in more):
            tries.add(remote.view("running"))
            await asyncio.sleep(0.01)
        assert [await call for call in more] == [ALPHABET] * 8
        assert max(tries) == 1
    for member in range(3):
        seamless(world, member)
    assert [set(call.cells) for member in (0, 1) for call in world.calls(member)] == [{"c0", "c1"}] * 2
    assert 'gyre_gateway_reroutes_total{cell="c0",reason="gone"}' in gateway.metrics.text().decode()
    world.cell("c1", known=True, routable=False)
    waits = asyncio.create_task(ask(world, 3))
    remote.go_on()
    remote.machines.heal()
    assert await waits == ALPHABET
    [call] = world.calls(3)
    assert call.cells[-1] == "c0"
    seamless(world, 3)
