"""A satellite's days: it serves, trains, hands over, serves newer weights, dies, and comes back.

The tests are in order, on one pair of cells; each begins with the satellite serving the newest version.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import pytest

import activities.cell_engine
import activities.cell_trainer
from gyre.serving.client import EngineClient
from gyre.training.protocol import TrainerUnavailable
from tests.cells.bench import Bench
from tests.serving.calls import begun, generate, until_running
from workflows import messages as m

pytestmark = pytest.mark.asyncio(loop_scope="module")

SWITCH = m.CellSwitch("cells-s0", "c1", "a test")
TRAIN = m.CellTrain("cells-s0", "c1")


def weights(version: int) -> m.CellWeights:
    return m.CellWeights("cells-s0", "c1", version)


async def test_a_cell_begins_by_serving(bench: Bench) -> None:
    await bench.until(lambda: bench.cell().routable)
    cell = bench.cell()
    assert (cell.role, cell.serving_version, cell.central, cell.max_running) == ("rollout", 0, False, 8)
    assert cell.engine_url == bench.satellite.engine.url
    assert cell.engine_incarnation == bench.satellite.engine.incarnation
    assert cell.trainer_incarnation == (await bench.satellite.trainer.client.status()).incarnation
    published = bench.version(0)
    assert published is not None and published.ticket is not None  # by central's trainer, at its start
    assert await bench.act(bench.on_satellite.cell_load_weights, weights(0)) == m.CellServing(0)


async def test_role_switch_both_ways(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    site = bench.satellite
    monkeypatch.setattr(activities.cell_engine, "DRAIN_S", 0.3)
    pids = (site.engine.process.pid, site.trainer.pid)
    assert site.engine.url is not None
    live = await begun(site.engine.url, list(range(50)), 900)
    there = await bench.act(bench.on_satellite.cell_to_train, SWITCH)
    assert (there.role, there.version) == ("train", 0)
    assert list(there.phases) == ["unroute", "drain", "release", "wake", "load", "report"]
    aborted = await live  # no gateway moved it: the cell cut it off, and it keeps its tokens
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort" and len(aborted["output_ids"]) > 0
    cell = bench.cell()
    assert (cell.role, cell.routable) == ("train", False)
    assert not (await site.trainer.status()).asleep
    assert await bench.act(bench.on_satellite.cell_load_weights, weights(0)) == m.CellServing(0)  # not its business now
    assert (await bench.act(bench.on_satellite.cell_to_train, SWITCH)).phases == {}  # a retry finds it done

    back = await bench.act(bench.on_satellite.cell_to_rollout, SWITCH)
    assert (back.role, back.version) == ("rollout", 0)
    assert list(back.phases) == ["push", "sleep", "resume", "report"]
    cell = bench.cell()
    assert (cell.role, cell.routable, cell.serving_version) == ("rollout", True, 0)
    assert (await site.trainer.status()).asleep
    assert (await bench.act(bench.on_satellite.cell_to_rollout, SWITCH)).phases == {}
    assert (site.engine.process.pid, site.trainer.pid) == pids
    assert len((await generate(site.engine.url, list(range(50)), 3))["output_ids"]) == 3
    changes = bench.role_changes()
    assert [(c.from_role, c.to_role, c.reason) for c in changes] == [
        ("rollout", "train", "a test"),
        ("train", "rollout", "a test"),
    ]
    for change, result in zip(changes, (there, back), strict=True):
        assert change.phases == result.phases and change.ended_at is not None
        assert change.rss_mb.keys() == {"before", *result.phases}
        assert all(sizes["engine"] > 100 and sizes["trainer"] > 100 for sizes in change.rss_mb.values())
        seconds = (change.ended_at - change.started_at).total_seconds()
        # Phases lie one after another within the change; what is between them is the machine's business.
        assert all(phase >= 0 for phase in change.phases.values())
        assert 0 < sum(change.phases.values()) <= seconds + 0.05


async def test_a_step_from_sampling_to_new_weights(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    site = bench.satellite
    step = await bench.sample_step(0)
    await bench.act(bench.on_satellite.cell_to_train, SWITCH)
    training, env = bench.train(bench.on_satellite.cell_train, TRAIN)
    finishing = asyncio.create_task(bench.act(bench.on_central.finish_step, m.FinishStep("cells-s0", step.id)))
    assert bench.hand_out(step) == 4
    await bench.until(lambda: all(b.state == "held" for b in bench.micro_batches(step)))
    mine = site.trainer.incarnation
    for batch in bench.micro_batches(step):
        # What the engine sampled with is what the trainer computes: the system's third promise.
        assert batch.metrics["mean_abs_logprob_diff"] < 1e-3
        assert batch.computed_by == "c1" and batch.n_targets == 50
    assert not finishing.done()  # the step is not closed
    bench.close(step)
    done = await finishing
    assert done.version == 1 and done.metrics["weights_changed"] == 1 and done.metrics["grad_norm"] > 0
    assert {b.state for b in bench.micro_batches(step)} == {"done"}
    assert {b.holder for b in bench.micro_batches(step)} == {bench.central.trainer.incarnation} != {mine}

    env.cancel()
    assert await training == m.CellTrained(4, 4 * 90)
    with caplog.at_level(logging.INFO, logger="gyre.cell"):
        back = await bench.act(bench.on_satellite.cell_to_rollout, SWITCH)
    assert back.version == 1
    assert "serves v1, pulled from central" in caplog.text
    assert bench.cell().serving_version == 1


async def test_weights_reach_a_serving_cell_and_agree_with_the_trainer(bench: Bench) -> None:
    """Sampled under v1, trained at v1: the log-probs agree again, so the engine really has the trainer's weights."""
    step = await bench.sample_step(1)
    bench.hand_out(step)
    bench.close(step)
    await bench.act(bench.on_satellite.cell_to_train, SWITCH)
    training, env = bench.train(bench.on_satellite.cell_train, TRAIN)
    done = await bench.act(bench.on_central.finish_step, m.FinishStep("cells-s0", step.id))
    env.cancel()
    await training
    assert done.version == 2
    assert done.metrics["mean_abs_logprob_diff"] < 1e-3
    assert await bench.act(bench.on_central.finish_step, m.FinishStep("cells-s0", step.id)) == done  # a retry
    await bench.act(bench.on_satellite.cell_to_rollout, SWITCH)

    # A step without variance gives no gradient; its version comes all the same, and a serving cell takes it live.
    empty = await bench.sample_step(2, rewards=(1, 1, 1))
    assert bench.hand_out(empty) == 0
    bench.close(empty)
    done = await bench.act(bench.on_central.finish_step, m.FinishStep("cells-s0", empty.id))
    assert (done.version, done.metrics["weights_changed"]) == (3, 0)
    url = bench.satellite.engine.url
    assert url is not None
    live = await begun(url, list(range(50)), 900)
    assert await bench.act(bench.on_satellite.cell_load_weights, weights(3)) == m.CellServing(3)
    assert bench.cell().serving_version == 3
    answer = await live
    assert [s["version"] for s in answer["meta_info"]["weight_versions"]] == ["2", "3"]
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


async def test_calls_may_finish_before_new_weights(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as above under serving.on_update = "finish": the call has one version, and the next one the new."""
    site = bench.satellite
    serving = bench.run.serving.model_copy(update={"on_update": "finish"})
    monkeypatch.setattr(site.store, "run", bench.run.model_copy(update={"serving": serving}))
    empty = await bench.sample_step(3, rewards=(1, 1))
    bench.hand_out(empty)
    bench.close(empty)
    await bench.act(bench.on_central.finish_step, m.FinishStep("cells-s0", empty.id))
    assert site.engine.url is not None
    live = asyncio.create_task(generate(site.engine.url, list(range(50)), 400))
    async with EngineClient(site.engine.url) as client:
        await until_running(client, 1)
    loading = asyncio.create_task(bench.act(bench.on_satellite.cell_load_weights, weights(4), 280))
    await bench.until(lambda: not bench.cell().admits)
    assert (bench.cell().routable, bench.cell().serving_version) == (True, 3)  # its calls stay where they are
    assert await loading == m.CellServing(4)
    answer = await live
    assert [s["version"] for s in answer["meta_info"]["weight_versions"]] == ["3"]
    assert answer["meta_info"]["finish_reason"]["type"] == "length" and len(answer["output_ids"]) == 400
    assert (bench.cell().admits, bench.cell().serving_version) == (True, 4)
    after = await generate(site.engine.url, list(range(50)), 3)
    assert [s["version"] for s in after["meta_info"]["weight_versions"]] == ["4"]


async def test_a_version_that_does_not_exist_is_an_error_to_retry(bench: Bench) -> None:
    with pytest.raises(LookupError, match="version 99 is not durable yet; the newest is 4"):
        await bench.act(bench.on_satellite.cell_load_weights, weights(99))


async def test_a_trainer_killed_with_a_gradient_loses_nothing(bench: Bench) -> None:
    site = bench.satellite
    step = await bench.sample_step(4, open_group=True)  # while a group is open, nothing is pushed yet
    bench.hand_out(step)
    await bench.act(bench.on_satellite.cell_to_train, SWITCH)
    training, env = bench.train(bench.on_satellite.cell_train, TRAIN)
    await bench.until(lambda: all(b.state == "held" for b in bench.micro_batches(step)))
    dead = site.trainer.incarnation
    assert site.trainer.pid is not None
    os.kill(site.trainer.pid, signal.SIGKILL)
    finishing = asyncio.create_task(bench.act(bench.on_central.finish_step, m.FinishStep("cells-s0", step.id)))
    bench.close(step)
    done = await finishing
    assert done.version == 5 and done.metrics["micro_batches"] == 4
    assert {b.attempts for b in bench.micro_batches(step)} == {2}
    assert site.trainer.incarnation not in (dead, None)
    env.cancel()
    assert (await training).micro_batches == 8
    await bench.act(bench.on_satellite.cell_to_rollout, SWITCH)
    assert bench.cell().trainer_incarnation == site.trainer.incarnation


async def test_an_engine_killed_comes_back_with_the_newest_weights(bench: Bench) -> None:
    site = bench.satellite
    dead = site.engine.incarnation
    seen = []
    assert site.engine.process.pid is not None
    os.kill(site.engine.process.pid, signal.SIGKILL)
    await bench.until(lambda: not bench.cell().routable)
    assert (bench.cell().engine_url, bench.cell().engine_incarnation) == (None, None)

    def back() -> bool:
        cell = bench.cell()
        seen.append((cell.routable, cell.serving_version))
        return cell.routable

    await bench.until(back)
    assert set(seen) <= {(False, None), (True, 5)}
    assert bench.cell().engine_incarnation == site.engine.incarnation != dead
    assert site.engine.url is not None
    answer = await generate(site.engine.url, list(range(50)), 3)
    assert answer["meta_info"]["weight_version"] == "5"


async def test_a_dead_central_is_no_hindrance_to_serving(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """The ticket's publisher is gone: the checkpoint serves, and the log says so. Then central publishes anew."""
    step = await bench.sample_step(5, rewards=(0, 0))
    bench.hand_out(step)
    bench.close(step)
    await bench.act(bench.on_central.finish_step, m.FinishStep("cells-s0", step.id))
    before = bench.version(6)
    assert before is not None and before.ticket is not None and bench.central.trainer.pid is not None
    os.kill(bench.central.trainer.pid, signal.SIGKILL)
    await bench.until(lambda: not bench.central.trainer.ready.is_set())
    with caplog.at_level(logging.INFO, logger="gyre.cell"):
        await bench.act(bench.on_satellite.cell_load_weights, weights(6))
    assert "v6 cannot be pulled, its checkpoint is read instead: publisher at" in caplog.text
    assert "serves v6, read from" in caplog.text
    await asyncio.wait_for(bench.central.trainer.ready.wait(), 300)
    after = bench.version(6)
    assert after is not None and after.ticket is not None
    assert after.ticket["incarnation"] != before.ticket["incarnation"]


async def test_a_push_waits_for_a_central_that_comes_back(bench: Bench) -> None:
    step = await bench.sample_step(6, open_group=True)
    bench.hand_out(step)
    await bench.act(bench.on_satellite.cell_to_train, SWITCH)
    training, env = bench.train(bench.on_satellite.cell_train, TRAIN)
    await bench.until(lambda: all(b.state == "held" for b in bench.micro_batches(step)))
    env.cancel()
    await training
    assert bench.central.trainer.pid is not None
    os.kill(bench.central.trainer.pid, signal.SIGKILL)
    await bench.until(lambda: not bench.central.trainer.ready.is_set())
    with pytest.raises(TrainerUnavailable):
        await bench.central.trainer.client.status()
    back = await bench.act(bench.on_satellite.cell_to_rollout, SWITCH)  # its push waits
    assert "push" in back.phases
    await bench.central.trainer.ready.wait()  # its agent may learn later than the push that it is back
    assert {b.holder for b in bench.micro_batches(step)} == {bench.central.trainer.incarnation}
    bench.close(step)
    done = await bench.act(bench.on_central.finish_step, m.FinishStep("cells-s0", step.id))
    assert (done.version, done.metrics["micro_batches"]) == (7, 4)
    assert await bench.act(bench.on_satellite.cell_load_weights, weights(7)) == m.CellServing(7)


async def test_a_trainer_that_hangs_is_started_anew(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Last: from here on the satellite's trainer is asked every half second."""
    site = bench.satellite
    hung = site.trainer.incarnation
    monkeypatch.setattr(activities.cell_trainer, "HEALTH_S", 0.5)
    monkeypatch.setattr(activities.cell_trainer, "SILENT_S", 2.0)
    assert site.trainer.pid is not None
    os.kill(site.trainer.pid, signal.SIGSTOP)
    await bench.until(lambda: bench.cell().trainer_incarnation == site.trainer.incarnation not in (hung, None))
