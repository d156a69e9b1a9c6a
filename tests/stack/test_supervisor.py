"""The supervisor over real Postgres and Temporal. The tests of one data folder run in order and share it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from gyre.cli.stackfile import ProcessState, StackState, start_ticks
from gyre.store.db import libpq_url
from workers.stack.processes import of_stack
from workers.stack.sweep import sweep

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0
"""What has not come about by then never will."""


class Toy:
    """A toy stack on one data folder."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> StackState:
        """Until the toy, which is ready as soon as it lives, has detached a process too."""
        before = len(self.detached())
        self.process = self.spawn("toy")
        return self.wait(lambda s: s.state == "ready" and s.pid == self.pid and len(self.detached()) > before)

    def spawn(self, kind: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "tests.stack.toy_stack", str(self.data), kind]
        return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def wait(self, right: Callable[[StackState], bool]) -> StackState:
        give_up = time.monotonic() + LIMIT_S
        while time.monotonic() < give_up:
            state = StackState.read(self.data)
            if state is not None and right(state):
                return state
            time.sleep(0.05)
        raise AssertionError(f"not so after {LIMIT_S} s: {StackState.read(self.data)}")

    def detached(self) -> list[int]:
        file = self.data / "detached"
        return [int(line) for line in file.read_text().split()] if file.exists() else []


def the(state: StackState, name: str) -> ProcessState:
    return next(p for p in state.processes if p.name == name)


def gone(data: Path, pids: list[int], limit_s: float = LIMIT_S) -> bool:
    give_up = time.monotonic() + limit_s
    while time.monotonic() < give_up:
        if not of_stack(data) and all(start_ticks(pid) is None for pid in pids):
            return True
        time.sleep(0.1)
    return False


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toy]:
    stack = Toy(tmp_path_factory.mktemp("stack"))
    yield stack
    if stack.process and stack.process.poll() is None:
        stack.process.kill()
    sweep(stack.data, grace_s=0.0)


def every_pid(state: StackState) -> list[int]:
    return [state.pid, *(p.pid for p in state.processes if p.pid)]


def test_a_killed_child_is_started_again(toy: Toy) -> None:
    state = toy.start()
    first = the(state, "toy").pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    after = toy.wait(lambda s: the(s, "toy").state == "ready" and the(s, "toy").pid not in (None, first))
    assert the(after, "toy").restarts == 1
    assert the(after, "postgres").pid == the(state, "postgres").pid


@pytest.mark.parametrize("name", ["temporal", "postgres"])
def test_a_killed_server_comes_back_on_its_port(toy: Toy, name: str) -> None:
    state = toy.wait(lambda s: s.state == "ready")
    pid = the(state, name).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    after = toy.wait(lambda s: the(s, name).state == "ready" and the(s, name).pid not in (None, pid))
    assert after.ports == state.ports


def test_a_second_supervisor_refuses_in_one_line(toy: Toy) -> None:
    second = toy.spawn("toy")
    said, _ = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 2
    assert said == f"gyre: a stack already runs on {toy.data} (pid {toy.pid})\n"


def test_cpu_seconds_of_components_are_recorded(toy: Toy) -> None:
    state = toy.wait(lambda s: s.state == "ready")
    with psycopg.connect(libpq_url(state.database_url)) as connection:
        connection.execute("CREATE TABLE kept (n int)")
        connection.execute("INSERT INTO kept VALUES (42)")
        connection.commit()
        components = {"postgres", "temporal", "prepare", "toy", "supervisor"}
        seen: dict[str, float] = {}
        give_up = time.monotonic() + LIMIT_S
        while not components <= seen.keys() and time.monotonic() < give_up:
            time.sleep(0.1)
            found = connection.execute("SELECT component, sum(cpu_s) FROM cpu_samples GROUP BY 1").fetchall()
            connection.commit()
            seen = dict(found)
    assert components <= seen.keys()
    assert all(0 < seconds < 120 for seconds in seen.values()), seen


def test_sigint_leaves_no_process(toy: Toy) -> None:
    state = toy.wait(lambda s: s.state == "ready")
    pids = [*every_pid(state), *toy.detached()]
    assert any(start_ticks(pid) for pid in toy.detached())
    os.kill(toy.pid, signal.SIGINT)
    assert toy.process is not None
    toy.process.communicate(timeout=LIMIT_S)
    assert toy.process.returncode == 0
    assert gone(toy.data, pids, 0.5)
    after = StackState.read(toy.data)
    assert after is not None
    assert after.state == "stopped"
    assert {p.state for p in after.processes} == {"stopped"}


def test_a_second_start_keeps_ports_and_rows_and_kill_9_leaves_no_process(toy: Toy) -> None:
    before = StackState.read(toy.data)
    state = toy.start()
    assert before is not None
    assert state.ports == before.ports
    with psycopg.connect(libpq_url(state.database_url)) as connection:
        assert connection.execute("SELECT n FROM kept").fetchall() == [(42,)]
    pids = [*every_pid(state), *toy.detached()]
    os.kill(toy.pid, signal.SIGKILL)
    assert toy.process is not None
    toy.process.communicate(timeout=LIMIT_S)
    assert gone(toy.data, pids), of_stack(toy.data)


def test_a_program_that_is_not_there_fails_the_stack(tmp_path: Path) -> None:
    process = Toy(tmp_path).spawn("missing")
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    state = StackState.read(tmp_path)
    assert state is not None and state.state == "failed"
    assert "/no/such/program" in state.message


def test_a_child_that_another_one_replaced_is_not_started_again(tmp_path: Path) -> None:
    stack = Toy(tmp_path)
    process = stack.spawn("replaced")
    try:
        # A child without a check is ready at once, before it ends: what is awaited is its end.
        state = stack.wait(lambda s: s.state == "ready" and the(s, "toy").state not in ("starting", "ready"))
        toy = the(state, "toy")
        assert (toy.state, toy.restarts, toy.detail) == ("stopped", 0, "ended with code 3; its log ends: gyre: taken")
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("misconfigured", "toy ended with code 2; its log ends: gyre: steps: must be 1"),
        ("broken", "toy 3 times in a row ended with code 1; its log ends: no such model"),
    ],
)
def test_a_child_that_cannot_live_fails_the_stack_in_one_line(tmp_path: Path, kind: str, why: str) -> None:
    stack = Toy(tmp_path)
    process = stack.spawn(kind)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    state = StackState.read(tmp_path)
    assert state is not None
    assert (state.state, state.message) == ("failed", f"{why} (log: {tmp_path}/logs/toy.log)")
    assert gone(tmp_path, [], 0.5)
