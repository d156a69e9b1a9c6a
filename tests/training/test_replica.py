"""Replicas and the ledger: every micro-batch counts once, whatever is sent twice, lost or refused."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sqlalchemy import Engine, func, select
from sqlalchemy.exc import OperationalError

from gyre.store import queries
from gyre.store.db import transaction
from gyre.store.models import MicroBatch, Sample
from gyre.store.queries import LedgerError
from gyre.training.batch import pack_rows
from gyre.training.replica import CommandError, Replica, ReplicaSettings
from tests.training.world import World, run_config


@pytest.fixture
def world(tiny_policy: Path, engine: Engine) -> World:
    world = World(run_config(tiny_policy), engine)
    world.open_run()
    return world


@pytest.fixture
def make(world: World, tmp_path: Path) -> Callable[..., Replica]:
    count = iter(range(100))

    def make(cell: str = "alpha", root: str = "checkpoints") -> Replica:
        settings = ReplicaSettings(world.config, cell, cell == "alpha", tmp_path / root, f"{cell}-{next(count)}")
        replica = Replica(settings, world.engine)
        replica.start()
        return replica

    return make


def both_begun(make: Callable[..., Replica], step_id: int) -> tuple[Replica, Replica]:
    """Central and a satellite that accumulate for the step."""
    central, satellite = make(), make("beta")
    satellite.load(0)
    for replica in (central, satellite):
        replica.begin(step_id)
    return central, satellite


def claim(replica: Replica, step_id: int) -> int | None:
    with transaction(replica.engine) as session:
        return queries.claim_micro_batch(session, step_id, replica.settings.cell, replica.settings.incarnation)


def work(replica: Replica, step_id: int, most: int = 100) -> list[int]:
    """Claim and compute up to `most` micro-batches."""
    done: list[int] = []
    while len(done) < most and (claimed := claim(replica, step_id)) is not None:
        replica.micro_batch(claimed)
        done.append(claimed)
    return done


def progress(replica: Replica, step_id: int) -> queries.StepProgress:
    with transaction(replica.engine) as session:
        return queries.step_progress(session, step_id)


def weights_after_alone(world: World, make: Callable[..., Replica], step_id: int) -> dict[str, torch.Tensor]:
    """What one trainer makes of the step, without leaving a trace in the database."""
    alone = make(root="alone")
    alone.begin(step_id)
    with transaction(world.engine) as session:
        ids = session.scalars(select(MicroBatch.id).where(MicroBatch.step_id == step_id)).all()
        batches = [queries.micro_batch_rows(session, i) for i in ids]
    for rows in batches:
        alone.trainer.micro_batch(pack_rows(rows), "alone")
    alone.trainer.optimizer_step(6)
    return alone.trainer.export_hf()


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], atol=2e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_a_micro_batch_that_was_made_ready_is_not_read_again(
    world: World, make: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    step_id = world.step(0)
    alone = weights_after_alone(world, make, step_id)
    replica = make()
    replica.begin(step_id)
    read: list[int] = []
    original = queries.micro_batch_rows
    monkeypatch.setattr(queries, "micro_batch_rows", lambda s, i: read.append(i) or original(s, i))
    first, second, third = (claim_one(replica, step_id) for _ in range(3))
    replica.prefetch(first)
    replica.micro_batch(first)
    replica.prefetch(second)
    replica.prefetch(second)
    replica.micro_batch(second)
    replica.prefetch(first)  # late, and of no use
    replica.micro_batch(third)
    assert read == [first, second, second, first, third]
    assert len(work(replica, step_id)) == 3
    replica.optimizer_step(step_id)
    assert_close(replica.trainer.export_hf(), alone)


def claim_one(replica: Replica, step_id: int) -> int:
    """One more, beside those that it has."""
    with transaction(replica.engine) as session:
        incarnation = replica.settings.incarnation
        found = queries.claim_ahead(session, step_id, replica.settings.cell, incarnation)
    assert found is not None
    return found


def test_the_gradient_does_not_depend_on_who_computed_what(world, make):
    """A step's micro-batches by one trainer in order, and by central and two satellites in any order: 1e-5."""
    step_id = world.step(0, rollouts=12)
    with transaction(world.engine) as session:
        ids = session.scalars(select(MicroBatch.id).where(MicroBatch.step_id == step_id)).all()
        batches = [pack_rows(queries.micro_batch_rows(session, i)) for i in ids]
    assert len(batches) == 12
    trainers = [replica.trainer for replica in (make(), make("beta"), make("beta"))]
    central, *satellites = trainers
    for trainer in trainers:
        if trainer.version is None:
            trainer.load(0, world.config.policy.path)
        assert all(buffer.dtype == torch.float32 for buffer in trainer.stream.buffers())
    for batch in batches:
        central.micro_batch(batch, "alone")
    alone = central.gradient().double()
    assert alone.norm() > 0
    chance = random.Random(0)
    seen = set()
    for _ in range(4):
        for trainer in trainers:
            trainer.begin()
        for batch in chance.sample(batches, len(batches)):
            chance.choice(trainers).micro_batch(batch, "spread")
        for satellite in chance.sample(satellites, len(satellites)):
            central.absorb(satellite.gradient())
        spread = central.gradient().double()
        assert (spread - alone).norm() <= 1e-5 * alone.norm()
        seen.add(tuple(spread[:1000].tolist()))
    assert len(seen) > 1, "the orders made no difference at all: nothing was spread"


def test_central_and_satellite_make_the_step_that_one_makes_alone(world, make):
    step_id = world.step(0)
    expected = weights_after_alone(world, make, step_id)
    central, satellite = both_begun(make, step_id)
    mine, theirs = work(central, step_id, 2), work(satellite, step_id)
    assert (len(mine), len(theirs)) == (2, 4)

    ticket = satellite.push(step_id)["ticket"]
    assert satellite.push(step_id)["ticket"] == ticket
    for _ in range(2):
        assert central.absorb(step_id, ticket, satellite.settings.incarnation) == {"micro_batches": 4}
    for _ in range(2):
        satellite.reset(step_id)
    assert progress(central, step_id).held_by == {central.settings.incarnation: 6}

    made = central.optimizer_step(step_id)
    assert made["version"] == 1
    assert central.optimizer_step(step_id) == made
    assert_close(central.trainer.export_hf(), expected)
    assert made["metrics"]["micro_batches"] == 6
    assert made["metrics"]["n_valid"] == 6
    with transaction(world.engine) as session:
        targets = session.scalar(select(func.sum(Sample.n_targets)))
        assert queries.step_row(session, step_id).state == "done"
    assert made["metrics"]["n_targets"] == targets

    central.publish(1)
    satellite.load(1)
    assert all(torch.equal(t, satellite.trainer.export_hf()[n]) for n, t in central.trainer.export_hf().items())


def test_a_run_of_steps_resumes_after_central_died(world, make, tmp_path):
    first = make()
    for index in range(2):
        step_id = world.step(index)
        first.begin(step_id)
        work(first, step_id)
        first.optimizer_step(step_id)
    second = make()
    assert second.version == 2
    step_id = world.step(2)
    for replica in (first, second):
        replica.begin(step_id)
    # The first is dead as far as the ledger knows: the second does its work again and equals it.
    work(first, step_id)
    with pytest.raises(LedgerError):  # nothing is the second's yet
        second.micro_batch(next(iter(first.held)))
    with transaction(world.engine) as session:
        queries.requeue_lost(session, step_id, {second.settings.incarnation})
    work(second, step_id)
    with pytest.raises(LedgerError, match="thrown away"):
        first.optimizer_step(step_id)
    made = second.optimizer_step(step_id)
    assert made["version"] == 3
    # checkpoint.keep = 2
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["v2", "v3"]


def test_a_lost_answer_never_counts_twice(world, make, monkeypatch):
    """The database goes away after the gradient is in memory; the command is sent again."""
    step_id = world.step(0)
    central = make()
    central.begin(step_id)
    claimed = claim(central, step_id)
    real = queries.hold_micro_batch

    def gone(*_: object) -> bool:
        raise OperationalError("update", {}, Exception("server closed the connection"))

    monkeypatch.setattr(queries, "hold_micro_batch", gone)
    with pytest.raises(OperationalError):
        central.micro_batch(claimed)
    gradient = central.trainer.gradient()
    monkeypatch.setattr(queries, "hold_micro_batch", real)
    central.micro_batch(claimed)
    central.micro_batch(claimed)
    assert torch.equal(central.trainer.gradient(), gradient)
    assert progress(central, step_id).held_by == {central.settings.incarnation: 1}


def test_a_claim_that_was_lost_voids_the_accumulator(world, make, monkeypatch):
    step_id = world.step(0)
    central = make()
    central.begin(step_id)
    work(central, step_id, 2)
    claimed = claim(central, step_id)
    compute = central.trainer.micro_batch

    def slow(*args: object) -> object:
        with transaction(world.engine) as session:  # somebody believes this trainer dead
            queries.requeue_lost(session, step_id, {"other"})
        return compute(*args)

    monkeypatch.setattr(central.trainer, "micro_batch", slow)
    with pytest.raises(LedgerError, match="claim was lost"):
        central.micro_batch(claimed)
    monkeypatch.setattr(central.trainer, "micro_batch", compute)
    assert central.trainer.gradient().abs().max() == 0
    assert progress(central, step_id).queued == 6
    expected = weights_after_alone(world, make, step_id)
    work(central, step_id)
    central.optimizer_step(step_id)
    assert_close(central.trainer.export_hf(), expected)


def test_a_push_that_the_ledger_does_not_know_is_not_added(world, make):
    step_id = world.step(0)
    central, satellite = both_begun(make, step_id)
    work(satellite, step_id, 3)
    ticket = satellite.push(step_id)["ticket"]
    with pytest.raises(LedgerError, match="not absorbed"):
        satellite.reset(step_id)
    with pytest.raises(CommandError, match="not reset yet"):
        satellite.micro_batch(claim(satellite, step_id))
    with transaction(world.engine) as session:  # the satellite is taken for dead
        queries.requeue_lost(session, step_id, {central.settings.incarnation})
    with pytest.raises(LedgerError, match="its push is void"):
        central.absorb(step_id, ticket, satellite.settings.incarnation)
    assert central.trainer.gradient().abs().max() == 0
    satellite.reset(step_id)
    assert len(work(satellite, step_id)) == 6
    # What the ledger counts on is not left behind.
    with transaction(world.engine) as session:
        queries.create_run(session, "other-s0", {}, "other-s0")
        other = queries.open_step(session, "other-s0", 0, 0)
    with pytest.raises(CommandError, match="push it"):
        satellite.begin(other)


def test_a_push_is_taken_while_central_computes(world, make, monkeypatch):
    step_id = world.step(0)
    expected = weights_after_alone(world, make, step_id)
    central, satellite = both_begun(make, step_id)
    work(satellite, step_id, 4)
    push = step_id, satellite.push(step_id)["ticket"], satellite.settings.incarnation
    compute, taken = central.trainer.micro_batch, []

    def computes(*batch):
        taking = threading.Thread(target=lambda: taken.append(central.take_push(*push)))
        taking.start()
        taking.join()  # for ever, if it waited for this
        return compute(*batch)

    monkeypatch.setattr(central.trainer, "micro_batch", computes)
    work(central, step_id, 1)
    assert taken == [{"micro_batches": 4}]
    satellite.reset(step_id)  # it may go
    assert progress(central, step_id).held_by == {central.settings.incarnation: 5}
    assert central.take_push(*push) is None and central.absorb(*push) == {"micro_batches": 4}  # sent again
    monkeypatch.setattr(central.trainer, "micro_batch", compute)
    assert len(work(central, step_id)) == 1
    central.optimizer_step(step_id)
    assert_close(central.trainer.export_hf(), expected)


def test_what_arrived_is_thrown_away_with_the_accumulator(world, make):
    step_id = world.step(0)
    expected = weights_after_alone(world, make, step_id)
    central, satellite = both_begun(make, step_id)
    work(satellite, step_id, 4)
    ticket = satellite.push(step_id)["ticket"]
    assert central.take_push(step_id, ticket, satellite.settings.incarnation) == {"micro_batches": 4}
    with transaction(world.engine) as session:  # central is taken for dead
        assert queries.requeue_lost(session, step_id, {satellite.settings.incarnation}) == 4
    with pytest.raises(LedgerError, match="thrown away"):
        central.optimizer_step(step_id)
    assert len(work(central, step_id)) == 6
    central.optimizer_step(step_id)
    assert_close(central.trainer.export_hf(), expected)


def test_what_arrived_and_cannot_be_added_is_computed_again(world, make, monkeypatch):
    step_id = world.step(0)
    expected = weights_after_alone(world, make, step_id)
    central, satellite = both_begun(make, step_id)
    work(satellite, step_id, 4)
    ticket = satellite.push(step_id)["ticket"]
    assert central.take_push(step_id, ticket, satellite.settings.incarnation) == {"micro_batches": 4}
    add = central.trainer.absorb
    monkeypatch.setattr(central.trainer, "absorb", lambda g: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(MemoryError):
        work(central, step_id)
    monkeypatch.setattr(central.trainer, "absorb", add)
    assert len(work(central, step_id)) == 6
    central.optimizer_step(step_id)
    assert_close(central.trainer.export_hf(), expected)


def test_a_push_of_a_step_that_central_has_not_begun_waits_for_its_turn(world, make):
    step_id = world.step(0)
    central, satellite = make(), make("beta")
    satellite.load(0)
    satellite.begin(step_id)
    work(satellite, step_id)
    push = step_id, satellite.push(step_id)["ticket"], satellite.settings.incarnation
    assert central.take_push(*push) is None and central.step_id is None
    assert central.absorb(*push) == {"micro_batches": 6}


def test_an_absorbed_gradient_that_is_queued_again_counts_once(world, make):
    """Central's agent was silent for a while: others queued its micro-batches again, and it claims them itself."""
    step_id = world.step(0)
    expected = weights_after_alone(world, make, step_id)
    central, satellite = make(), make("beta")
    satellite.load(0)
    satellite.begin(step_id)
    work(satellite, step_id, 4)
    central.absorb(step_id, satellite.push(step_id)["ticket"], satellite.settings.incarnation)
    satellite.reset(step_id)
    with transaction(world.engine) as session:
        assert queries.requeue_lost(session, step_id, {satellite.settings.incarnation}) == 4
    assert len(work(central, step_id)) == 6
    made = central.optimizer_step(step_id)
    assert_close(central.trainer.export_hf(), expected)
    assert made["metrics"]["micro_batches"] == 6


def test_a_push_of_what_central_has_already_counts_once(world, make):
    """As above, but the satellite computes them again; one that overlaps in part, and one in whole."""
    step_id = world.step(0)
    expected = weights_after_alone(world, make, step_id)
    central, satellite = both_begun(make, step_id)
    work(central, step_id, 2)
    with transaction(world.engine) as session:
        queries.requeue_lost(session, step_id, {satellite.settings.incarnation})
    work(satellite, step_id)
    ticket = satellite.push(step_id)["ticket"]
    with pytest.raises(LedgerError, match="against the ledger"):
        central.absorb(step_id, ticket, satellite.settings.incarnation)
    with pytest.raises(LedgerError, match="not absorbed"):
        satellite.reset(step_id)
    central.absorb(step_id, ticket, satellite.settings.incarnation)
    satellite.reset(step_id)

    with transaction(world.engine) as session:
        queries.requeue_lost(session, step_id, {satellite.settings.incarnation})
    work(satellite, step_id)
    ticket = satellite.push(step_id)["ticket"]
    with pytest.raises(LedgerError, match="against the ledger"):
        central.absorb(step_id, ticket, satellite.settings.incarnation)
    central.absorb(step_id, ticket, satellite.settings.incarnation)
    satellite.reset(step_id)
    central.optimizer_step(step_id)
    assert_close(central.trainer.export_hf(), expected)


def test_an_absorb_whose_commit_was_not_heard_of_is_finished(world, make, monkeypatch):
    step_id = world.step(0)
    central, satellite = make(), make("beta")
    satellite.load(0)
    satellite.begin(step_id)
    work(satellite, step_id)
    ticket = satellite.push(step_id)["ticket"]
    expected = satellite.trainer.gradient()
    commit = central._commit

    @contextlib.contextmanager
    def unheard():
        with commit() as session:
            yield session
        raise ConnectionError("lost")

    monkeypatch.setattr(central, "_commit", unheard)
    with pytest.raises(ConnectionError):
        central.absorb(step_id, ticket, satellite.settings.incarnation)
    monkeypatch.setattr(central, "_commit", commit)
    central.absorb(step_id, ticket, satellite.settings.incarnation)
    assert torch.equal(central.trainer.gradient(), expected)


def test_a_step_taken_but_not_committed_is_committed_when_sent_again(world, make, monkeypatch):
    step_id = world.step(0)
    central = make()
    central.begin(step_id)
    work(central, step_id)
    real = queries.finish_step

    def gone(*_: object, **__: object) -> None:
        raise OperationalError("update", {}, Exception("server closed the connection"))

    monkeypatch.setattr(queries, "finish_step", gone)
    with pytest.raises(OperationalError):
        central.optimizer_step(step_id)
    weights = central.trainer.export_hf()
    monkeypatch.setattr(queries, "finish_step", real)
    assert central.optimizer_step(step_id)["version"] == 1
    assert all(torch.equal(t, weights[n]) for n, t in central.trainer.export_hf().items())


def test_a_step_that_is_not_whole_is_refused_and_nothing_changes(world, make):
    step_id = world.step(0)
    central = make()
    central.begin(step_id)
    work(central, step_id, 3)
    weights = central.trainer.export_hf()
    with pytest.raises(LedgerError, match="does not hold the gradient of 3"):
        central.optimizer_step(step_id)
    assert central.version == 0
    assert all(torch.equal(t, weights[n]) for n, t in central.trainer.export_hf().items())
    expected = weights_after_alone(world, make, step_id)
    central.begin(step_id)
    work(central, step_id)
    central.optimizer_step(step_id)
    assert_close(central.trainer.export_hf(), expected)


def test_a_step_without_samples_still_makes_a_version(world, make):
    with transaction(world.engine) as session:
        step_id = queries.open_step(session, world.config.run_id, 0, 0)
        queries.close_step(session, step_id)
    central = make()
    before = central.trainer.export_hf()
    made = central.optimizer_step(step_id)
    assert made["version"] == 1
    assert made["metrics"]["weights_changed"] is False
    assert all(torch.equal(t, before[n]) for n, t in central.trainer.export_hf().items())


def test_central_never_goes_back_to_an_older_version(world, make):
    """A training loop that looked before the optimizer step asks for the version that was trained then."""
    step_id = world.step(0)
    central = make()
    central.begin(step_id)
    work(central, step_id)
    central.optimizer_step(step_id)
    with pytest.raises(CommandError, match="version 0 is over; central trains version 1"):
        central.load(0)
    with pytest.raises(CommandError, match="is done"):
        central.begin(step_id)
    assert central.publish(1)["ticket"]["version"] == 1


def test_a_satellite_falls_back_to_the_checkpoint_when_central_is_gone(world, make):
    central, satellite = make(), make("beta")
    assert central._weights is not None
    central._weights[0].close()
    satellite.load(0)
    assert satellite.version == 0
    assert all(torch.equal(t, satellite.trainer.export_hf()[n]) for n, t in central.trainer.export_hf().items())


def test_commands_that_do_not_fit_say_what_to_do(world, make):
    step_id = world.step(0)
    central, satellite = make(), make("beta")
    with pytest.raises(CommandError, match="has no version 7"):
        central.load(7)
    with pytest.raises(CommandError, match="has no version 3"):
        central.publish(3)
    with pytest.raises(CommandError, match="but None is loaded"):
        satellite.begin(step_id)
    with pytest.raises(CommandError, match="begin that step first"):
        central.micro_batch(claim(central, step_id))
    assert "push" not in central.commands()
    assert "optimizer_step" not in satellite.commands()
