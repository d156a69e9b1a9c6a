"""kill -9 of a real trainer at every point of a step's way: the batch ends, with the gradient of an undisturbed one.

One pair of cells for the module. Each case trains one step of the run and has one trainer killed at one point; then the
version that came of it is held against what a trainer in peace makes of the version before.

`make faults` takes every point and a longer random story; the usual tests take those marked with a star.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import AsyncExitStack

import pytest

from tests.cells import deadly
from tests.cells.agent import CENTRAL, SATELLITE
from tests.cells.pair import Pair
from tests.transfer.cutting import Cut

pytestmark = pytest.mark.asyncio(loop_scope="module")


# who reaches the point, which point, who is killed; * also in the usual tests
KILLS = [
    (SATELLITE, "micro-batch received", SATELLITE, ""),
    (SATELLITE, "gradient half computed", SATELLITE, ""),
    (SATELLITE, "gradient computed", SATELLITE, "*"),
    (SATELLITE, "gradient written, not committed", SATELLITE, ""),
    (SATELLITE, "gradient committed", SATELLITE, ""),
    (SATELLITE, "push published", SATELLITE, "*"),
    (CENTRAL, "pull of the push begins", SATELLITE, ""),
    (CENTRAL, "pull of the push done", SATELLITE, ""),
    (CENTRAL, "absorb committed", SATELLITE, "*"),
    (SATELLITE, "push to be forgotten", SATELLITE, ""),
    (SATELLITE, "push forgotten", SATELLITE, ""),
    (CENTRAL, "gradient computed", CENTRAL, ""),
    (CENTRAL, "gradient committed", CENTRAL, ""),
    (SATELLITE, "push published", CENTRAL, ""),
    (CENTRAL, "pull of the push begins", CENTRAL, ""),
    (CENTRAL, "absorb written, not committed", CENTRAL, ""),
    (CENTRAL, "absorb committed", CENTRAL, "*"),
    (CENTRAL, "absorb done", CENTRAL, ""),
    (SATELLITE, "push to be forgotten", CENTRAL, ""),
    (CENTRAL, "step to be taken", CENTRAL, ""),
    (CENTRAL, "step taken", CENTRAL, ""),
    (CENTRAL, "checkpoint half written", CENTRAL, ""),
    (CENTRAL, "checkpoint renamed", CENTRAL, "*"),
    (CENTRAL, "version to be written", CENTRAL, ""),
    (CENTRAL, "version written, not committed", CENTRAL, "*"),
    (CENTRAL, "version committed", CENTRAL, ""),
    (CENTRAL, "weights to be published", CENTRAL, ""),
    (CENTRAL, "ticket written, not committed", CENTRAL, ""),
]
EVERY = bool(os.environ.get("GYRE_EVERY_FAULT"))
CASES = [(reaches, point, dies) for reaches, point, dies, star in KILLS if star or EVERY]
CUTS = [(CENTRAL, "close"), (CENTRAL, "spoil"), (SATELLITE, "close")]
if EVERY:
    CUTS += [(SATELLITE, "spoil"), (CENTRAL, "silence"), (SATELLITE, "silence")]


@pytest.mark.parametrize(("reaches", "point", "dies"), CASES, ids=[f"{d} at {r}'s {p}" for r, p, d in CASES])
async def test_a_kill_at_any_point_leaves_the_gradient_as_it_was(
    pair: Pair, reaches: str, point: str, dies: str
) -> None:
    step = pair.next_step()
    killed = pair.agents[dies].site.trainer.incarnation
    given = deadly.order(pair.sockets, reaches, point, dies)
    # Whoever is to reach the point works alone until then, so that it has something to work on.
    first = CENTRAL if reaches == CENTRAL and "gradient" in point else SATELLITE
    async with AsyncExitStack() as work:
        await work.enter_async_context(pair.agents[first].working())
        finishing = asyncio.create_task(pair.finish(step))
        await pair.until(lambda: not given.exists(), f"{reaches} reaches {point!r}")
        second = SATELLITE if first == CENTRAL else CENTRAL
        await work.enter_async_context(pair.agents[second].working())
        done = await finishing
    assert done.version == step.index + 1
    pair.check(step)
    await pair.until(lambda: pair.agents[dies].site.trainer.incarnation not in (killed, None), "it is back")
    ticket = pair.published(step.index + 1)
    assert ticket is not None and ticket["version"] == step.index + 1


@pytest.mark.parametrize(("who", "how"), CUTS)
async def test_a_transfer_that_is_cut_off_is_refused_and_tried_again(pair: Pair, who: str, how: str) -> None:
    """Central pulls gradients, the satellite weights; the connection breaks in the midst of the tensors."""
    step = pair.next_step()
    given = deadly.order_cut(pair.sockets, who, Cut(how, 30_000))  # type: ignore[arg-type]
    async with pair.agents[SATELLITE].working():
        done = await pair.finish(step)
    assert done.version == step.index + 1 and not given.exists()
    assert {row.computed_by for row in pair.rows(step)} == {SATELLITE}
    assert {row.attempts for row in pair.rows(step)} == {1}, "what was computed is not lost"
    pair.check(step)
    log = (pair.settings.logs / f"trainer-{who}.log").read_text()
    reason = {"close": "connection ended after", "spoil": "does not match", "silence": "timed out"}[how]
    assert reason in log


async def test_kills_in_any_order(pair: Pair) -> None:
    """Two orders a step and a kill at a random moment, by a seed that a failure names."""
    seed = 20261130
    dice = random.Random(seed)
    for number in range(12 if EVERY else 1):
        step = pair.next_step()
        for cell in (CENTRAL, SATELLITE):
            reaches, point, dies, _ = dice.choice([k for k in KILLS if k[0] == cell])
            deadly.order(pair.sockets, reaches, point, dies)
        async with AsyncExitStack() as work:
            for agent in pair.agents.values():
                await work.enter_async_context(agent.working())
            finishing = asyncio.create_task(pair.finish(step))
            await asyncio.sleep(dice.random())
            victim = pair.agents[dice.choice([CENTRAL, SATELLITE])].site.trainer.pid
            if victim is not None:
                os.kill(victim, signal.SIGKILL)
            done = await finishing
        assert done.version == step.index + 1, f"seed {seed}, step {number}"
        pair.check(step)
        for left in pair.sockets.glob("order-*.json"):  # of a point that this step did not pass
            left.unlink()
