"""CPU accounting: no second is lost when a process ends between two looks, and none is counted twice."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from workers.stack.cpu import CpuMeter, Owner, divide_by_role
from workers.stack.processes import Process, command_line, snapshot

ME, WORKER, CHILD = 10, 20, 30
W = Owner("worker")


def process(pid: int, parent: int, own: float, reaped: float = 0.0, start: int = 1) -> Process:
    return Process(pid, parent, session=pid, start=start, own_s=own, reaped_s=reaped, zombie=False)


def table(*processes: Process) -> dict[int, Process]:
    return {p.pid: p for p in processes}


def meter() -> CpuMeter:
    return CpuMeter(ME, divide=lambda _process, owner: owner)


def test_a_living_tree_is_counted_by_what_it_grew() -> None:
    m = meter()
    assert m.sample(table(process(ME, 1, 0.0), process(WORKER, ME, 2.0), process(CHILD, WORKER, 3.0)), {WORKER: W}) == {
        W: 5.0
    }
    assert m.sample(table(process(ME, 1, 0.0), process(WORKER, ME, 2.5), process(CHILD, WORKER, 4.0)), {WORKER: W}) == {
        W: 1.5
    }


def test_a_child_seen_and_then_reaped_is_counted_once() -> None:
    m = meter()
    m.sample(table(process(ME, 1, 0.0), process(WORKER, ME, 1.0), process(CHILD, WORKER, 3.0)), {WORKER: W})
    # It used 0.5 s more before it ended; its parent has waited for all 3.5 s of it.
    assert m.sample(table(process(ME, 1, 0.0), process(WORKER, ME, 1.0, reaped=3.5)), {WORKER: W}) == {W: 0.5}


def test_a_child_never_seen_is_counted_by_its_parent() -> None:
    m = meter()
    m.sample(table(process(ME, 1, 0.0), process(WORKER, ME, 1.0)), {WORKER: W})
    assert m.sample(table(process(ME, 1, 0.0), process(WORKER, ME, 1.0, reaped=0.7)), {WORKER: W}) == {W: 0.7}


def test_a_reused_pid_is_another_process() -> None:
    m = meter()
    m.sample(table(process(ME, 1, 0.0), process(WORKER, ME, 9.0, start=1)), {WORKER: W})
    m.reaped(WORKER, 9.25, W)
    found = m.sample(table(process(ME, 1, 0.0), process(WORKER, ME, 0.5, start=2)), {WORKER: W})
    assert found == {W: pytest.approx(0.75)}


def test_an_adopted_orphan_counts_as_harness_and_keeps_its_owner() -> None:
    m = meter()
    m.sample(table(process(ME, 1, 0.0), process(WORKER, ME, 0.0), process(CHILD, WORKER, 1.0)), {WORKER: W})
    # Its parent died; the supervisor has adopted it. It was the worker's before, so it stays so.
    assert m.sample(table(process(ME, 1, 0.0), process(CHILD, ME, 1.5)), {})[W] == 0.5
    assert m.sample(table(process(ME, 1, 0.0), process(99, ME, 2.0)), {})[Owner("harness")] == 2.0


def test_an_agents_children_are_its_engine_and_its_trainer() -> None:
    agent = Owner("agent", "central")
    trainer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)", "workers.trainer"])
    try:
        while "workers.trainer" not in command_line(trainer.pid):
            time.sleep(0.01)
        everyone = snapshot()
        assert divide_by_role(everyone[trainer.pid], agent) == Owner("trainer", "central")
        assert divide_by_role(everyone[os.getpid()], agent) == Owner("engine", "central")
    finally:
        trainer.kill()
        trainer.wait()


def test_real_processes_that_come_and_go_between_looks_are_all_counted() -> None:
    burn = "import time\nwhile time.process_time() < 0.15: pass"
    program = f"import subprocess, sys\nfor _ in range(6): subprocess.run([sys.executable, '-c', {burn!r}])\ninput()"
    m = CpuMeter(os.getpid(), divide=lambda _process, owner: owner)
    m.sample(snapshot(), {})
    worker = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    counted = 0.0
    for _ in range(400):
        time.sleep(0.1)
        counted += m.sample(snapshot(), {worker.pid: W}).get(W, 0.0)
        if counted > 0.9 and not _children(worker.pid):
            break
    assert worker.stdin is not None
    worker.stdin.close()
    _, _, usage = os.wait4(worker.pid, 0)
    worker.returncode = 0
    m.reaped(worker.pid, usage.ru_utime + usage.ru_stime, W)
    counted += m.sample(snapshot(), {}).get(W, 0.0)
    # /proc counts in ticks of 10 ms, a few of which are lost or won for each of the seven processes.
    assert counted == pytest.approx(usage.ru_utime + usage.ru_stime, abs=0.08)
    assert counted > 0.9


def _children(pid: int) -> list[int]:
    return [p.pid for p in snapshot().values() if p.parent == pid]
