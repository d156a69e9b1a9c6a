"""Whatever dies, is cut off, replaced or taken for dead, in whatever order: each micro-batch counts exactly once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import get_args

import psycopg
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from gyre.store import queries as q
from gyre.store.db import libpq_url, make_engine, transaction
from gyre.store.queries import FencedError, LedgerError
from gyre.training.replica import CommandError
from tests.cells.counting import Agent, Cluster, Fault, Faults, Killed, use
from tests.training.world import World, run_config

CELLS = ("alpha", "sat0", "sat1")
REFUSED = (LedgerError, CommandError, OperationalError)

acts = st.one_of(
    st.tuples(st.sampled_from(["work", "work", "push", "absorb", "reset", "prepare"]), st.sampled_from(CELLS)),
    st.tuples(st.sampled_from(["kill", "replace", "doubt", "requeue", "zombie"]), st.sampled_from(CELLS)),
    st.tuples(st.just("pushed while central computes"), st.sampled_from(CELLS[1:])),
    st.tuples(st.just("step"), st.just("alpha")),
    st.tuples(st.just("fault"), st.sampled_from(get_args(Fault))),
)


@pytest.fixture(scope="module")
def cluster(postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    base, _, template = postgres_url.rpartition("/")
    with psycopg.connect(libpq_url(f"{base}/postgres"), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE exactly_once TEMPLATE {template} STRATEGY wal_log")
        engine = make_engine(f"{base}/exactly_once")
        with pytest.MonkeyPatch.context() as patch:
            use(patch, faults := Faults())
            world = World(run_config(tmp_path_factory.mktemp("policy")), engine)
            world.open_run()
            yield Cluster(world, faults, tmp_path_factory.mktemp("checkpoints"))
        engine.dispose()
        admin.execute("DROP DATABASE exactly_once WITH (FORCE)")


class Story:
    """One step of the run, from its micro-batches to its version, with everything that happens on the way."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        with transaction(self.engine) as s:
            newest = q.newest_version(s, cluster.world.config.run_id)
        self.index = 0 if newest is None else newest.version
        self.step_id = cluster.world.step(self.index, rollouts=cluster.size // 2, per_batch=1)

    @property
    def engine(self) -> Engine:
        return self.cluster.world.engine

    def tell(self, act: str, what: str) -> None:
        if act == "fault":
            self.cluster.faults.next.append(what)  # type: ignore[arg-type]
        elif act == "doubt":
            self.cluster.requeue(self.step_id, {what})
        elif act == "requeue":
            self.cluster.requeue(self.step_id)
        elif act in ("kill", "replace"):
            self._anew(what, dead=act == "kill")
        elif act == "pushed while central computes":
            self._push_beside(self.cluster.agents[what])
        elif act == "zombie":
            for zombie in [z for z in self.cluster.zombies if z.cell == what]:
                for deed in ("work", "push", "absorb", "reset", "step"):
                    self.attempt(zombie, deed)
        else:
            self.attempt(self.cluster.agents[what], act)

    def attempt(self, agent: Agent, act: str) -> bool:
        """Whether it did something. A refusal is an answer; a kill has its agent replaced."""
        if not agent.alive:
            return False
        try:
            return self._do(agent, act)
        except REFUSED:
            return False
        except FencedError:
            assert agent in self.cluster.zombies, "who has the cell is never fenced"
            self.cluster.kill(agent)
            self.cluster.zombies.remove(agent)
            return False
        except Killed:
            if agent in self.cluster.zombies:
                self.cluster.zombies.remove(agent)
                self.cluster.kill(agent)
            else:
                self._anew(agent.cell, dead=True)
            return False

    def _do(self, agent: Agent, act: str) -> bool:
        if act == "prepare":
            return agent.prepare(self.step_id, self.index)
        if act == "step":
            if not agent.central:
                return False
            agent.step(self.step_id)
            return True
        if act == "absorb":
            if agent.central:
                if agent in self.cluster.zombies:  # in the midst of it when it was replaced
                    for sender in self.cluster.agents.values():
                        agent.absorb_from(sender, self.step_id)
                return False
            central = self.cluster.agents["alpha"]
            try:
                central.absorb_from(agent, self.step_id)
            except Killed:
                self._anew(central.cell, dead=True)
                return False
            except FencedError as error:
                raise AssertionError("central has its cell") from error
            return True
        if act in ("push", "reset") and agent.central:
            return False
        if act == "push":
            agent.push(self.step_id)
        elif act == "reset":
            agent.replica.reset(self.step_id)
            agent.ticket = None
        else:
            return agent.work(self.step_id)
        return True

    def _push_beside(self, sender: Agent) -> None:
        """A kill of the thread that takes the push is one of central."""
        central = self.cluster.agents["alpha"]

        def meanwhile() -> None:
            with contextlib.suppress(*REFUSED):
                central.take_from(sender, self.step_id)

        central.trainer.meanwhile = meanwhile
        self.attempt(sender, "push")
        self.attempt(central, "work")
        central.trainer.meanwhile = lambda: None

    def _anew(self, cell: str, *, dead: bool) -> None:
        """A new agent, whose start may be killed, too."""
        if dead:
            self.cluster.kill(self.cluster.agents[cell])
        while True:
            try:
                self.cluster.start(cell)
                return
            except (Killed, OperationalError):
                continue

    def finish(self) -> None:
        """What agents do when nothing more happens to them."""
        self.cluster.faults.next.clear()
        for _ in range(60):
            with transaction(self.engine) as s:
                if q.step_row(s, self.step_id).state == "done":
                    return
            self.cluster.requeue(self.step_id)
            for agent in list(self.cluster.agents.values()):
                self.attempt(agent, "prepare")
                if not agent.replica.pushed:
                    while self.attempt(agent, "work"):
                        pass
                for act in ("push", "absorb", "reset"):
                    self.attempt(agent, act)
            self.attempt(self.cluster.agents["alpha"], "step")
        raise AssertionError("the batch does not end")

    def check(self) -> None:
        with transaction(self.engine) as s:
            row = q.weight_version(s, self.cluster.world.config.run_id, self.index + 1)
            assert row is not None
            assert q.step_progress(s, self.step_id).done == self.cluster.size
            counted = self.cluster.faults.saved[row.checkpoint]
        assert torch.equal(counted, torch.ones(self.cluster.size)), counted


@settings(max_examples=1000 if os.environ.get("GYRE_EVERY_FAULT") else 25)
@given(st.lists(acts, max_size=40))
def test_each_micro_batch_counts_once_whatever_happens(cluster: Cluster, events: list[tuple[str, str]]) -> None:
    story = Story(cluster)
    for cell in CELLS:
        story.attempt(cluster.agents[cell], "prepare")
    for event in events:
        story.tell(*event)
    story.finish()
    story.check()
    for zombie in list(cluster.zombies):  # they know nothing of the step's end, and change nothing
        for act in ("work", "push", "absorb", "reset", "step"):
            story.attempt(zombie, act)
    cluster.zombies.clear()
    story.check()
