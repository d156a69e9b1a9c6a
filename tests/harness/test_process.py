"""Detached processes: started once, found again, ended whole."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gyre.harness import process, shepherd
from gyre.harness.base import BOX, HarnessError, Launch, base_env
from tests.harness.conftest import processes_in, sh, until

SETSID_ORPHANS = """
import os, signal, subprocess, sys, time
# A tree that does not want to end: grandchildren in sessions of their own that ignore TERM and outlive their parents.
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open('up', 'a').write('x'); time.sleep(600)"
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", deaf])
        os._exit(0)
    os.wait()
while not os.path.exists("up") or os.path.getsize("up") < 3:
    time.sleep(0.02)
"""


UNTIL_TOLD = "until [ -e ../../told ]; do sleep 0.02; done"  # the rollout's folder has `told`


async def test_exit_code_output_and_cpu_time_are_kept(rollout: Path) -> None:
    started = process.start(sh(rollout, "echo out; echo err >&2; exit 3"), rollout)
    ended = await process.wait(rollout)
    assert isinstance(ended, process.Exited)
    assert (ended.code, ended.signal, ended.reason, ended.left_over) == (3, None, "exited", 0)
    assert ended.cpu_s is not None and 0 <= ended.cpu_s < 1
    assert ended.started <= ended.ended < time.time()
    assert not started.attached
    assert (rollout / "harness.log").read_text().split() == ["out", "err"]


async def test_cpu_time_counts_the_whole_tree(rollout: Path) -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    process.start(sh(rollout, f'( {sys.executable} -I -S -c "{burn}" ) & wait'), rollout)
    ended = await process.wait(rollout)
    assert isinstance(ended, process.Exited) and ended.cpu_s is not None
    assert 0.3 <= ended.cpu_s < 0.6


async def test_a_signal_is_told_from_an_exit_code(rollout: Path) -> None:
    process.start(sh(rollout, "kill -SEGV $$"), rollout)
    ended = await process.wait(rollout)
    assert isinstance(ended, process.Exited)
    assert (ended.code, ended.signal, ended.reason) == (None, signal.SIGSEGV, "exited")


@pytest.mark.parametrize(("argv", "code"), [(("no-such-program",), 127), (("/etc/hostname",), 126)])
async def test_a_command_that_cannot_run_says_so_in_the_log(rollout: Path, argv: tuple[str, ...], code: int) -> None:
    process.start(Launch(argv, base_env(rollout / BOX), rollout / BOX / "workspace"), rollout)
    ended = await process.wait(rollout)
    assert isinstance(ended, process.Exited) and ended.code == code
    assert f"cannot run {argv[0]!r}" in (rollout / "harness.log").read_text()


async def test_nothing_of_this_process_leaks_into_the_harness(rollout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_DATABASE_URL", "secret")
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    process.start(sh(rollout, "env; ls -l /proc/self/fd; cat"), rollout)  # cat: standard input is empty, not ours
    ended = await process.wait(rollout)
    os.close(read_end)
    os.close(write_end)
    text = (rollout / "harness.log").read_text()
    assert isinstance(ended, process.Exited) and ended.code == 0
    assert "secret" not in text and "pipe:" not in text and shepherd.LOCK_FILE not in text
    assert f"HOME={rollout}/box/home" in text


def test_status_before_anything_was_started(rollout: Path) -> None:
    assert process.status(rollout) == process.NotStarted()
    assert process.kill_tree(rollout) == process.NotStarted()
    with pytest.raises(HarnessError, match="prepare the workspace"):
        process.start(sh(rollout, "true"), rollout / "absent")


async def test_starting_twice_attaches_and_runs_once(rollout: Path) -> None:
    launch = sh(rollout, f"echo once >> ../../count; {UNTIL_TOLD}")
    first, second = process.start(launch, rollout), process.start(launch, rollout)
    assert (second.pid, second.start_time) == (first.pid, first.start_time)
    assert (first.attached, second.attached) == (False, True)
    (rollout / "told").touch()
    await process.wait(rollout)
    assert process.start(launch, rollout).attached, "what has ended is not run again"
    assert (rollout / "count").read_text() == "once\n"


async def test_racing_starts_run_once(rollout: Path) -> None:
    results: list[process.Started] = []
    launch = sh(rollout, f"echo once >> ../../count; {UNTIL_TOLD}")
    threads = [threading.Thread(target=lambda: results.append(process.start(launch, rollout))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({r.pid for r in results}) == 1 and sum(not r.attached for r in results) == 1
    (rollout / "told").touch()
    await process.wait(rollout)
    assert (rollout / "count").read_text() == "once\n"


def test_a_shepherd_that_finds_the_lock_taken_runs_nothing(rollout: Path) -> None:
    """The one that holds it has not written pid.json yet: the second attaches to it all the same."""
    results: list[process.Started] = []
    with (rollout / "shepherd.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        launch = sh(rollout, "touch ../../ran")
        thread = threading.Thread(target=lambda: results.append(process.start(launch, rollout)))
        thread.start()
        time.sleep(0.3)
        assert thread.is_alive() and not (rollout / "ran").exists()
        shepherd.write_json(str(rollout / "pid.json"), {"pid": 1, "start_time": 2})  # whole at once, as a shepherd does
        thread.join(60)
    assert results == [process.Started(1, 2, attached=True)]
    (rollout / "pid.json").unlink()


async def test_a_pid_that_another_process_has_by_now_is_not_taken_for_ours(rollout: Path) -> None:
    process.start(sh(rollout, "exit 0"), rollout)
    await process.wait(rollout)
    (rollout / "exit.json").unlink()
    found = json.loads((rollout / "pid.json").read_text())
    found["pid"] = os.getpid()
    (rollout / "pid.json").write_text(json.dumps(found))
    assert isinstance(process.status(rollout), process.Lost)
    assert isinstance(process.kill_tree(rollout), process.Lost)  # and this process lives


async def test_orphans_in_their_own_sessions_end_with_the_harness(rollout: Path) -> None:
    script = rollout / "orphans.py"
    script.write_text(SETSID_ORPHANS)
    process.start(sh(rollout, f"{sys.executable} -I -S {script}; exit 5"), rollout, grace_s=0.3)
    ended = await process.wait(rollout)
    assert isinstance(ended, process.Exited)
    assert (ended.code, ended.reason, ended.left_over) == (5, "exited", 3)
    assert processes_in(rollout) == []


async def test_kill_tree_ends_orphans_too(rollout: Path) -> None:
    script = rollout / "orphans.py"
    script.write_text(SETSID_ORPHANS)
    process.start(sh(rollout, f"{sys.executable} -I -S {script}; touch ../../up; sleep 600"), rollout, grace_s=0.3)
    until(lambda: len(processes_in(rollout)) == 5)  # the shell, its `sleep` and three orphans
    ended = await asyncio.to_thread(process.kill_tree, rollout)
    assert isinstance(ended, process.Exited) and (ended.reason, ended.signal) == ("killed", signal.SIGTERM)
    assert processes_in(rollout) == []
    assert process.kill_tree(rollout) == ended == process.status(rollout)


def test_kill_tree_stops_a_tree_that_keeps_forking(rollout: Path) -> None:
    script = rollout / "bomb.py"
    script.write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "os.setsid()\n"
        "end = time.monotonic() + 60\n"
        "while time.monotonic() < end:\n"
        "    if os.fork():\n"  # the parent goes, the child goes on: a chain that no single pid stands for
        "        os._exit(0)\n"
        "    os.setsid(); time.sleep(0.005)\n"
    )
    process.start(sh(rollout, f"{sys.executable} -I -S {script}; touch ../../up; sleep 600"), rollout, grace_s=0.2)
    until((rollout / "up").exists)
    ended = process.kill_tree(rollout)
    assert isinstance(ended, process.Exited) and ended.reason == "killed"
    assert processes_in(rollout) == []


def test_a_frozen_shepherd_does_not_save_the_tree(rollout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = sh(rollout, "trap '' TERM; setsid sleep 600 & touch ../../up; sleep 600")
    started = process.start(launch, rollout, grace_s=0.0)
    until((rollout / "up").exists)
    os.kill(started.pid, signal.SIGSTOP)
    send = shepherd.send
    monkeypatch.setattr(shepherd, "send", lambda pids, signum: signum == signal.SIGCONT or send(pids, signum))
    ended = process.kill_tree(rollout, patience_s=0.3)
    assert isinstance(ended, process.Exited) and (ended.reason, ended.cpu_s) == ("killed", None)
    assert processes_in(rollout) == []
    assert shepherd.start_time(started.pid) is None


async def test_a_shepherd_that_dies_takes_the_harness_along_and_is_lost(rollout: Path) -> None:
    started = process.start(sh(rollout, "setsid sleep 600 & touch ../../up; sleep 600"), rollout)
    until((rollout / "up").exists)
    os.kill(started.pid, signal.SIGKILL)
    assert isinstance(await process.wait(rollout), process.Lost)
    until(lambda: len(processes_in(rollout)) <= 2)  # the shell is gone, its children are strays
    assert isinstance(process.kill_tree(rollout), process.Lost)
    until(lambda: processes_in(rollout) == [])


def test_a_reader_in_another_process_finds_it_again(rollout: Path) -> None:
    """The one who started it is killed with -9; the harness goes on, and whoever comes next gets its end."""
    starter = (
        "import sys, time; from pathlib import Path; from gyre.harness import process\n"
        "from tests.harness.conftest import sh\n"
        "r = Path(sys.argv[1]); process.start(sh(r, sys.argv[2]), r)\n"
        "print('started', flush=True); time.sleep(600)"
    )
    argv = [sys.executable, "-c", starter, str(rollout), f"{UNTIL_TOLD}; echo done; exit 7"]
    host = subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], text=True)
    assert host.stdout is not None and host.stdout.readline() == "started\n"
    host.kill()
    host.wait()
    host.stdout.close()
    running = process.status(rollout)
    assert isinstance(running, process.Running)
    assert process.start(sh(rollout, "exit 1"), rollout).pid == running.pid
    (rollout / "told").touch()
    ended = asyncio.run(process.wait(rollout))
    assert isinstance(ended, process.Exited) and ended.code == 7
    assert (rollout / "harness.log").read_text() == "done\n"


async def test_an_agent_that_removes_everything_is_still_known(rollout: Path) -> None:
    removed = rollout.parent / "removed"
    launch = sh(rollout, f"{UNTIL_TOLD}; rm -rf ../../* ..; touch {removed}; exec sleep 600")
    started = process.start(launch, rollout)
    (rollout / "told").touch()
    until(removed.exists)
    until((rollout / "pid.json").exists)  # written anew
    again = process.start(launch, rollout)
    assert (again.pid, again.attached) == (started.pid, True)
    ended = await asyncio.to_thread(process.kill_tree, rollout)
    assert isinstance(ended, process.Exited) and ended.reason == "killed"
    assert processes_in(rollout) == []


async def test_a_cancelled_wait_leaves_the_harness_running(rollout: Path) -> None:
    process.start(sh(rollout, "sleep 600"), rollout)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(process.wait(rollout), 0.2)
    assert isinstance(process.status(rollout), process.Running)


async def test_waiting_works_without_pidfds(rollout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_pidfd", lambda pid: None)
    process.start(sh(rollout, f"{UNTIL_TOLD}; exit 2"), rollout)
    assert isinstance(process.wait_blocking(rollout, 0.05), process.Running)
    (rollout / "told").touch()
    ended = await process.wait(rollout)
    assert isinstance(ended, process.Exited) and ended.code == 2


def test_end_all_leaves_nothing(tmp_path: Path, new_rollout: Callable[[], Path]) -> None:
    rollouts = [new_rollout() for _ in range(3)]
    process.start(sh(rollouts[0], "exit 0"), rollouts[0])
    for rollout in rollouts[1:]:
        process.start(sh(rollout, "setsid sleep 600 & sleep 600"), rollout)
    attempt = rollouts[0] / "verifier" / "1-x"
    attempt.mkdir(parents=True)
    assert isinstance(process.wait_blocking(rollouts[0], 60), process.Exited)
    process.start(Launch(("sleep", "600"), base_env(attempt), rollouts[0] / BOX / "workspace"), attempt)
    assert process.end_all(tmp_path) == 3
    assert processes_in(tmp_path) == [] and process.end_all(tmp_path) == 0


def test_a_process_out_of_reach_does_not_save_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an agent starts by sudo is another user's: the rest still gets its signal."""
    got: list[int] = []

    def kill(pid: int, signum: int) -> None:
        if pid == 1:
            raise PermissionError
        got.append(pid)

    monkeypatch.setattr(os, "kill", kill)
    shepherd.send([1, 2, 3], signal.SIGTERM)
    assert got == [2, 3]
