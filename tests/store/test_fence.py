"""One agent a cell: whoever was replaced can commit nothing any more, also when both are at work at once."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import Engine

from gyre.store import queries as q
from gyre.store.db import transaction
from gyre.store.queries import FencedError
from tests.store.world import RUN


def take(engine: Engine, name: str = "sat") -> int:
    with transaction(engine) as s:
        return q.take_cell(s, RUN, name, central=False, max_running=4)


def test_each_agent_has_an_epoch_of_its_own(engine: Engine) -> None:
    with transaction(engine) as s:
        q.check_epoch(s, RUN, "sat", 0)  # nobody has taken it: a trainer that was started by hand may work
        with pytest.raises(FencedError):
            q.check_epoch(s, RUN, "sat", 1)
    assert [take(engine), take(engine), take(engine, "other")] == [1, 2, 1]
    for old in (0, 1, 3):
        with transaction(engine) as s, pytest.raises(FencedError, match=r"taken by another agent \(epoch 2\)"):
            q.check_epoch(s, RUN, "sat", old)
    with transaction(engine) as s:
        q.check_epoch(s, RUN, "sat", 2)
        q.check_epoch(s, RUN, "other", 1)


def test_a_cell_that_was_taken_serves_nothing_and_has_no_trainer(engine: Engine) -> None:
    take(engine)
    with transaction(engine) as s:
        q.upsert_cell(
            s, RUN, "sat", role="train", engine_url="http://old", routable=True, serving_version=3,
            engine_incarnation="e1", trainer_incarnation="t1",
        )  # fmt: skip
        assert q.living_trainers(s, RUN, 60) == {"t1"}
    take(engine)
    with transaction(engine) as s:
        [cell] = q.cells(s, RUN)
        assert (cell.epoch, cell.role, cell.routable, cell.max_running) == (2, "rollout", False, 4)
        assert (cell.engine_url, cell.serving_version, cell.engine_incarnation, cell.trainer_incarnation) == (None,) * 4
        assert q.living_trainers(s, RUN, 60) == set()


def test_a_commit_in_flight_ends_before_the_cell_is_taken(engine: Engine) -> None:
    """Between the check and its commit nobody takes the cell; after it is taken no check passes."""
    take(engine)
    taken = threading.Event()

    def replace() -> None:
        take(engine)
        taken.set()

    with transaction(engine) as s:
        q.check_epoch(s, RUN, "sat", 1)
        thread = threading.Thread(target=replace)
        thread.start()
        assert not taken.wait(0.5)
    thread.join(30)
    assert taken.is_set()
    with transaction(engine) as s, pytest.raises(FencedError):
        q.check_epoch(s, RUN, "sat", 1)


def test_trainer_and_agent_of_one_cell_commit_at_once(engine: Engine) -> None:
    take(engine)
    with transaction(engine) as trainer, transaction(engine) as agent:
        q.check_epoch(trainer, RUN, "sat", 1)
        q.check_epoch(agent, RUN, "sat", 1)
