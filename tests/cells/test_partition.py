"""A cell cut off from Temporal, but not from Postgres and its peers, goes on: its gradient is in the batch, once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from sqlalchemy.engine import make_url
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

import activities.cell
import activities.cell_site
import activities.cell_store
from activities.cell_engine import CellEngine
from tests.cells import deadly
from tests.cells.agent import CENTRAL, SATELLITE
from tests.cells.link import Link
from tests.cells.pair import Pair
from tests.workflows.server import NAMESPACE, TemporalServer
from workflows import messages as m
from workflows import verbs
from workflows.cell import Cell
from workflows.messages.run import plan_of
from workflows.names import cell_queue

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEARTBEAT_S = 3.0


@pytest.fixture
def temporal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemporalServer]:
    with TemporalServer(tmp_path_factory.mktemp("temporal") / "server.log") as server:
        yield server


class Idle(CellEngine):
    """A server that is never started, and comes back when it is told to."""

    url = incarnation = None  # type: ignore[assignment]

    async def resume(self) -> int:
        self.ready.set()
        return 0


async def test_a_satellite_cut_off_from_temporal_trains_on_and_only_once(
    pair: Pair, temporal: TemporalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporal gives its activity up; what that began goes on, pushes, and is joined by the next attempt."""
    monkeypatch.setattr(verbs, "CELL_HEARTBEAT", timedelta(seconds=HEARTBEAT_S))
    begun: list[object] = []
    monkeypatch.setattr(activities.cell, "Work", lambda *args: begun.append(args) or activities.cell_work.Work(*args))
    agent = pair.agents[SATELLITE]
    agent.site.engine = Idle(agent.site.store, agent.site.config, pair.settings.logs / "engine.log")
    agent.site.engine.ready.set()
    direct = await Client.connect(temporal.address, namespace=NAMESPACE)
    async with Link(temporal.address) as link:
        beat = timedelta(seconds=0.5)
        by_link = Worker(
            await Client.connect(link.address, namespace=NAMESPACE),
            task_queue=cell_queue(pair.run.run_id, SATELLITE),
            activities=agent.activities.all(),
            max_heartbeat_throttle_interval=beat,
            default_heartbeat_throttle_interval=beat,
            graceful_shutdown_timeout=timedelta(0),
        )
        flow = Worker(direct, task_queue="flow", workflows=[Cell], workflow_runner=UnsandboxedWorkflowRunner())
        async with by_link, flow:
            handle = await direct.start_workflow(
                Cell.run, m.CellInput(plan_of(pair.run), SATELLITE, "train", "train"), id="cell", task_queue="flow"
            )
            deadly.slow(pair.sockets, 0.2)
            step = pair.next_step()
            await pair.until(lambda: any(row.state == "held" for row in pair.rows(step)), "the cell trains")
            link.cut()

            async def runs() -> bool:
                """Whether Temporal believes that an attempt to train does."""
                pending = (await handle.describe()).raw_description.pending_activities
                started = PendingActivityState.PENDING_ACTIVITY_STATE_STARTED
                return any(a.activity_type.name == "cell_train" and a.state == started for a in pending)

            async def given_up() -> bool:
                return not await runs()

            async def serves() -> bool:
                return (await handle.query(Cell.role)).role == "rollout"

            await pair.until(given_up, "Temporal gives the attempt up")
            # Given up by Temporal and still cut off; the batch ends all the same.
            await pair.finish(step)
            pair.check(step)
            assert {(row.computed_by, row.attempts) for row in pair.rows(step)} == {(SATELLITE, 1)}

            link.heal()
            await pair.until(runs, "the next attempt begins")
            second = pair.next_step()
            await pair.until(lambda: any(row.state == "held" for row in pair.rows(second)), "the cell trains again")
            assert len(begun) == 1, "the second attempt joined what the first one began"

            link.cut()  # and once more: now Temporal wants the cell to serve
            await pair.until(given_up, "Temporal gives that one up, too")
            await handle.signal(Cell.set_role, m.SetRole("rollout", "a test"))
            link.heal()
            await pair.until(serves, "the cell serves")
            assert agent.site.role == "rollout" and (await agent.site.trainer.status()).asleep
            (pair.sockets / "slow").unlink()
            async with pair.agents[CENTRAL].working():
                await pair.finish(second)
            pair.check(second)
            assert (await agent.site.trainer.status()).asleep, "nothing that was left running has woken it"
            await handle.signal(Cell.stop)
            await handle.result()
    await agent.site.set_role("train")
    await agent.site.trainer.client.wake()


async def test_a_satellite_cut_off_from_postgres_is_taken_for_dead_and_counts_nothing_twice(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its micro-batches are trained by others meanwhile. When it is back, what it holds is void, and it works on."""
    monkeypatch.setattr(activities.cell_site, "BEAT_S", 0.3)
    monkeypatch.setattr(activities.cell_store, "LOST_AFTER_S", 3.0)
    url = make_url(pair.settings.database_url)
    async with Link(f"{url.host}:{url.port}") as link:
        port = int(link.address.rpartition(":")[2])
        by_link = url.set(host="127.0.0.1", port=port).render_as_string(hide_password=False)
        for old in (await pair.replace(SATELLITE, by_link), await pair.replace(CENTRAL)):  # both beat faster now
            await old.stop()
        deadly.slow(pair.sockets, 0.2)
        step = pair.next_step()
        async with pair.agents[SATELLITE].working():
            await pair.until(lambda: sum(row.state == "held" for row in pair.rows(step)) >= 2, "the satellite trains")
            link.cut()
            (pair.sockets / "slow").unlink()
            async with pair.agents[CENTRAL].working():
                await pair.finish(step)
            pair.check(step)
            assert {row.computed_by for row in pair.rows(step)} == {CENTRAL}
            assert sum(row.attempts > 1 for row in pair.rows(step)) >= 2
            link.heal()
            second = pair.next_step()
            await pair.finish(second)
        pair.check(second)
        assert {row.computed_by for row in pair.rows(second)} == {SATELLITE}
        await (await pair.replace(SATELLITE)).stop()
