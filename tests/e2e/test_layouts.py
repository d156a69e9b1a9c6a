"""A whole run whose cells train in two layouts, through the death of a rank: its steps are those of one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from sqlalchemy import Engine, select

from gyre.config import RunConfig
from gyre.objective import divisor
from gyre.store import queries
from gyre.store.db import make_engine, transaction
from gyre.store.models import MicroBatch, Step, WeightVersion
from gyre.training.batch import pack_rows
from gyre.training.trainer import Trainer
from gyre.training.weights import read_hf_weights
from tests.e2e.conftest import LiveRun
from tests.e2e.test_kill import everything_is_accounted_for, trained_after
from tests.training.test_parallel_service import distance

STEPS = 3

pytestmark = pytest.mark.skipif(not os.environ.get("GYRE_EVERY_FAULT"), reason="a minute and a half; make faults")


def test_a_run_over_two_layouts_takes_the_steps_of_one_process(start_run: Callable[..., LiveRun]) -> None:
    run = start_run(
        steps=STEPS,
        layouts=("{ tensor_parallel = 2 }", "{ pipeline_parallel = 3 }"),
        budget=256,  # a rollout a micro-batch: enough of them that both cells get some
        scheduling="colocate",
    )
    run.wait_for("training of the second step", lambda: run.ready() and trained_after(run, 1))
    [rank] = run.child("cell-central", "workers.trainer").children()
    rank.kill()

    assert run.process.wait(timeout=900) == 0, run.log.read_text()
    everything_is_accounted_for(run, STEPS)
    died = (run.data / "logs" / "trainer-central.log").read_text()
    assert died.count("rank 1 of the trainer ended with code -9") == 1
    assert run.ask("select distinct computed_by from micro_batches order by 1") == [("central",), ("satellite",)]
    with database(run) as engine:
        again(engine, 0)
        before, after, alone = again(engine, STEPS - 1)  # the newest two checkpoints are kept
    assert after is not None
    assert (moved := distance(before, alone)) > 0.01 and distance(after, alone) < 1e-3 * moved


@contextmanager
def database(run: LiveRun) -> Iterator[Engine]:
    engine = make_engine(run.state().database_url, pool_size=1)
    yield engine
    engine.dispose()


def again(
    engine: Engine, index: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor] | None, dict[str, torch.Tensor]]:
    """Take a step of the run once more, by one process, from its recorded micro-batches and the checkpoint before it.

    The weights before it, those that the run made of them (None: their checkpoint is gone), and ours.
    """
    with transaction(engine) as session:
        step = session.scalars(select(Step).where(Step.index == index)).one()
        config = RunConfig.model_validate(queries.run_row(session, step.run_id).config)
        folder = {v.version: Path(v.checkpoint) for v in session.scalars(select(WeightVersion))}
        targets = queries.step_targets(session, step.id)
        numbers = session.scalars(select(MicroBatch.id).where(MicroBatch.step_id == step.id)).all()
        rows = [queries.micro_batch_rows(session, number) for number in numbers]
    alone = Trainer(config.policy.path, config.trainer, config.objective, seed=config.seed)
    alone.load(index, folder[index])
    for number, found in zip(numbers, rows, strict=True):
        alone.micro_batch(pack_rows(found), str(number))
    assert step.n_valid is not None and step.metrics is not None
    taken = alone.optimizer_step(divisor(config.objective, step.n_valid, targets))
    assert step.metrics["grad_norm"] == pytest.approx(taken.grad_norm, rel=1e-5)
    after = folder[index + 1]
    return read_hf_weights(folder[index]), read_hf_weights(after) if after.exists() else None, alone.export_hf()
