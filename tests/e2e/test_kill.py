"""A run through which processes are killed: it goes on, and everything is accounted for exactly once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil

from tests.e2e.conftest import LiveRun

STEPS = 5
PER_STEP = 8


def marked(data: Path) -> list[psutil.Process]:
    """Processes that carry the data folder's mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("GYRE_DATA") == str(data) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_a_run_survives_kills_and_counts_everything_once(start_run: Callable[..., LiveRun]) -> None:
    run = start_run(steps=STEPS)
    run.wait_for("the first rollouts", lambda: run.ready() and harnesses(run) > 0)

    host = run.kill("rollout-host")
    run.wait_for("two settled rollouts after the host's death", lambda: run.settled() >= 2)
    assert run.pid("rollout-host") != host

    for victim, settled in (("control", PER_STEP), ("temporal", PER_STEP + 2), ("gateway", 2 * PER_STEP)):
        run.wait_for(f"{settled} settled rollouts", lambda settled=settled: run.settled() >= settled)
        run.kill(victim)
    run.wait_for("the fourth step's rollouts", lambda: run.settled() >= 3 * PER_STEP and harnesses(run) > 0)
    run.kill("cell-satellite")  # its engine and its trainer end with it
    run.wait_for("a micro-batch of the fourth step or later", lambda: trained_after(run, 3))
    run.child("cell-central", "workers.trainer").kill()

    assert run.process.wait(timeout=900) == 0, run.log.read_text()
    everything_is_accounted_for(run, STEPS)
    restarted = {p.name for p in run.state().processes if p.restarts}
    assert restarted >= {"rollout-host", "control", "temporal", "gateway", "cell-satellite"}
    # The restarted agent took its cell anew; the others had theirs all the time.
    assert run.ask("select name, epoch from cells order by name") == [("central", 1), ("satellite", 2)]


def harnesses(run: LiveRun) -> int:
    return len(run.ask("select 1 from rollouts where harness_started_at is not null and harness_ended_at is null"))


def trained_after(run: LiveRun, step: int) -> bool:
    sql = (
        "select 1 from micro_batches m join steps s on s.id = m.step_id where s.index >= :step and m.state <> 'queued'"
    )
    return bool(run.ask(sql, step=step))


def everything_is_accounted_for(run: LiveRun, steps: int) -> None:
    assert run.ask("select state from runs") == [("done",)]
    assert run.ask("select index, state from steps order by index") == [(i, "done") for i in range(steps)]
    # Each rollout is settled once, with a reward or a reason; nothing is trained without a reward.
    assert run.ask("select count(*), count(distinct id) from rollouts where state = 'settled'") == [
        (steps * PER_STEP, steps * PER_STEP)
    ]
    assert run.ask("select count(*) from rollouts where (reward is null) <> (exclude_reason is not null)") == [(0,)]
    assert run.ask("select count(*) from samples s join rollouts r on r.id = s.rollout_id where r.reward is null") == [
        (0,)
    ]
    # Killing a host, a worker, Temporal, the gateway, an engine or a trainer is no reason to lose a rollout.
    assert run.ask("select count(*) from rollouts where exclude_reason is not null") == [(0,)]
    # Every sample is in one micro-batch, and the gradient of every micro-batch was counted.
    assert run.ask("select count(*) from samples where micro_batch_id is null") == [(0,)]
    assert run.ask("select count(*) from micro_batches where state <> 'done'") == [(0,)]
    # Every sampled token has one fate, and none is still open.
    sampled = run.ask("select sum(length) from nodes where kind = 'generated'")
    assert run.ask("select sum(tokens) from token_accounting") == sampled
    assert run.ask(
        "select count(*) from token_accounting where fate in ('open', 'queued') or fate like 'excluded%'"
    ) == [(0,)]
    assert run.ask("select sum(tokens) from token_accounting where fate = 'trained'") == run.ask(
        "select sum(n_targets) from samples"
    )
    # Versions rise by one a step; sampler and trainer agree on the trained tokens.
    assert run.ask("select version from weight_versions order by version") == [(v,) for v in range(steps + 1)]
    assert all(diff is None or float(str(diff)) < 1e-3 for (diff,) in run.ask("select logprob_diff from step_summary"))


def test_interrupt_leaves_nothing_and_the_same_command_resumes(start_run: Callable[..., LiveRun]) -> None:
    import signal

    run = start_run(steps=1)
    run.wait_for("the first rollouts", lambda: run.ready() and harnesses(run) > 0)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(timeout=120) == 130, run.log.read_text()
    assert marked(run.data) == []
    again = start_run(steps=1, data=run.data.parent)
    assert again.process.wait(timeout=600) == 0, again.log.read_text()
    assert again.ask("select count(*) from rollouts where state = 'settled'") == [(PER_STEP,)]
    assert again.ask("select count(*) from steps where state = 'done'") == [(1,)]
