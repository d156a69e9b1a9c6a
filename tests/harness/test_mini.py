"""The real, unmodified mini-swe-agent against a scripted model, warm and cold."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gyre.harness import process, shepherd
from gyre.harness.base import BOX, HarnessError, Launch, Preload, base_env
from gyre.harness.forkserver import ForkServer
from gyre.harness.mini_swe_agent import CALL_TIMEOUT_S, MiniSweAgent
from tests.harness.conftest import mini_launch, processes_in, until
from tests.harness.model import ScriptedModel


def check_run(model: ScriptedModel, rollout: Path, ended: object) -> None:
    assert isinstance(ended, process.Exited) and ended.code == 0, (rollout / "harness.log").read_text()
    assert (rollout / BOX / "workspace" / "made.txt").read_text() == "hello\n"
    assert {p.name for p in (rollout / BOX / "workspace").iterdir()} == {"made.txt"}
    trajectory = json.loads((rollout / "trajectory.json").read_text())
    assert trajectory["info"]["exit_status"] == "Submitted"
    assert trajectory["info"]["mini_version"] == "2.4.6"
    tools = [m["content"] for m in trajectory["messages"] if m["role"] == "tool"]
    assert str(rollout / BOX / "workspace") in tools[0]
    assert "mini-swe-agent (step 3" in (rollout / "harness.log").read_text()


async def test_cold_and_warm_runs_send_the_same_requests(
    mini: MiniSweAgent, fork_server: ForkServer, new_rollout: Callable[[], Path]
) -> None:
    seen = []
    for server in (None, fork_server):
        model = ScriptedModel(["echo hello > made.txt", "cat made.txt"])
        rollout = new_rollout()
        process.start(mini_launch(mini, model, rollout), rollout, fork_server=server)
        ended = await process.wait(rollout)
        model.close()
        assert isinstance(ended, process.Exited) and ended.code == 0, (rollout / "harness.log").read_text()
        seen.append((model.requests, model.paths, model.keys, (rollout / "harness.log").read_text()))
    cold, warm = seen
    assert cold[:3] == warm[:3]
    assert len(cold[0]) == 3
    assert set(cold[1]) == {"/r/tok/v1/chat/completions"} and set(cold[2]) == {"Bearer tok"}
    assert cold[0][0]["model"] == "policy" and not cold[0][0].get("stream")

    def conversation(log: str, rollout: str) -> str:
        return log[log.index("System:") : log.index("Saved trajectory")].replace(rollout, "")

    assert conversation(cold[3], "/r0") == conversation(warm[3], "/r1")


async def test_a_warm_run_costs_a_fraction_of_a_cold_one(
    mini: MiniSweAgent, fork_server: ForkServer, model: ScriptedModel, new_rollout: Callable[[], Path]
) -> None:
    rollouts = [new_rollout() for _ in range(4)]
    for rollout in rollouts:
        process.start(mini_launch(mini, model, rollout), rollout, fork_server=fork_server)
    ends = await asyncio.gather(*(process.wait(r) for r in rollouts))
    for rollout, ended in zip(rollouts, ends, strict=True):
        check_run(model, rollout, ended)
    costs = [e.cpu_s for e in ends if isinstance(e, process.Exited) and e.cpu_s is not None]
    assert len(costs) == 4 and max(costs) < 0.6  # cold: 4 to 5; typical: 0.1
    tasks = os.listdir(f"/proc/{fork_server.pid}/task")
    assert len(tasks) == 1, "a fork-server with threads may deadlock what it forks"
    assert fork_server.facts["learned"] > 50, "the rehearsal taught nothing"


async def test_killed_in_the_middle_of_a_tool_call(
    mini: MiniSweAgent, fork_server: ForkServer, model: ScriptedModel, rollout: Path
) -> None:
    model.commands = ["touch started; nohup setsid sleep 600 > /dev/null & sleep 600"]
    process.start(mini_launch(mini, model, rollout), rollout, fork_server=fork_server)
    until((rollout / BOX / "workspace" / "started").exists)
    until(lambda: len(processes_in(rollout)) >= 3)  # the harness, its shell and what sleeps
    ended = await asyncio.to_thread(process.kill_tree, rollout)
    assert isinstance(ended, process.Exited) and ended.reason == "killed"
    assert processes_in(rollout) == []
    assert (rollout / BOX / "workspace" / "started").exists(), "the workspace stays as it stands"


async def test_killed_while_the_model_is_silent(
    mini: MiniSweAgent, fork_server: ForkServer, model: ScriptedModel, rollout: Path
) -> None:
    model.delay_s = 600
    process.start(mini_launch(mini, model, rollout), rollout, fork_server=fork_server)
    until(lambda: model.requests)
    begin = time.monotonic()
    ended = await asyncio.to_thread(process.kill_tree, rollout)
    assert isinstance(ended, process.Exited) and ended.reason == "killed"
    assert time.monotonic() - begin < 60  # not the 600 s of the model


async def test_runs_outlive_their_fork_server_which_comes_back(
    mini: MiniSweAgent, new_rollout: Callable[[], Path], tmp_path: Path
) -> None:
    """With a program that is imported in no time: `python -m timeit CODE`."""
    assert mini.preload is not None
    preload = Preload(mini.preload.python, "timeit:main", ("timeit",))
    server = ForkServer(preload, tmp_path / "sockets", tmp_path / "warm.log")
    server.start()
    pids = []
    try:
        rollouts = [new_rollout(), new_rollout()]
        for rollout in rollouts:
            argv = (str(preload.python), "timeit", "-n1", "-r1", "import time; time.sleep(1); open('made', 'w')")
            launch = Launch(argv, base_env(rollout / BOX), rollout / BOX / "workspace", preload)
            assert not process.start(launch, rollout, fork_server=server).attached
            assert server.pid is not None
            pids.append(server.pid)
            os.kill(server.pid, signal.SIGKILL)
        for rollout in rollouts:
            ended = await process.wait(rollout)
            assert isinstance(ended, process.Exited) and ended.code == 0, (rollout / "harness.log").read_text()
            assert (rollout / BOX / "workspace" / "made").exists()
    finally:
        server.stop()
    assert pids[0] != pids[1]
    assert not server.alive and list((tmp_path / "sockets").iterdir()) == []


async def test_a_model_that_fails_for_a_while_is_asked_again(
    mini: MiniSweAgent, fork_server: ForkServer, model: ScriptedModel, rollout: Path
) -> None:
    model.fault = lambda turn, n: (503, {"error": {"message": "later"}}) if n <= 2 else None
    process.start(mini_launch(mini, model, rollout), rollout, fork_server=fork_server)
    check_run(model, rollout, await process.wait(rollout))


async def test_a_prompt_over_the_context_ends_the_run_at_once(
    mini: MiniSweAgent, fork_server: ForkServer, model: ScriptedModel, rollout: Path
) -> None:
    message = "This model's maximum context length is 2048 tokens. However, your messages resulted in 3000 tokens."
    error = {"message": message, "type": "invalid_request_error", "code": "context_length_exceeded"}
    model.fault = lambda turn, n: (400, {"error": error}) if turn == 1 else None
    process.start(mini_launch(mini, model, rollout), rollout, fork_server=fork_server)
    ended = await asyncio.wait_for(process.wait(rollout), 200)
    assert isinstance(ended, process.Exited) and ended.code == 1 and ended.reason == "exited"
    assert "ContextWindowExceededError" in (rollout / "harness.log").read_text()
    assert len(model.requests) == 2, "not one retry"
    assert ended.cpu_s is not None and ended.cpu_s < 2, "a failing run must not cost more than a good one"


def test_the_launch_is_the_program_s_own_command(
    mini: MiniSweAgent, model: ScriptedModel, rollout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYRE_DATABASE_URL", "secret")
    launch = mini_launch(mini, model, rollout)
    assert launch.argv[1].endswith("/bin/mini") and launch.cwd == rollout / BOX / "workspace"
    assert f"model.model_kwargs.timeout={CALL_TIMEOUT_S}" in launch.argv and CALL_TIMEOUT_S >= 3600
    assert "secret" not in launch.env.values()
    assert launch.env["OPENAI_API_BASE"] == f"{model.url}/r/tok/v1"


def test_errors_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mini.yml", "a=b.yaml"):
        with pytest.raises(HarnessError, match=r"harness.config: .*rename it"):
            MiniSweAgent(tmp_path / name, {})
    monkeypatch.setenv("GYRE_MINI_PYTHON", str(tmp_path / "absent"))
    with pytest.raises(HarnessError, match="run `make setup`, or set GYRE_MINI_PYTHON"):
        MiniSweAgent(None, {})


def test_a_fork_server_that_cannot_come_up_says_where_to_look(mini: MiniSweAgent, tmp_path: Path) -> None:
    assert mini.preload is not None
    server = ForkServer(
        Preload(mini.preload.python, "no.such:thing", ("no_such_module",)), tmp_path / "sockets", tmp_path / "warm.log"
    )
    with pytest.raises(HarnessError, match=r"did not come up \(exit 1\); see .*warm.log, or set harness.warm = false"):
        server.start()
    assert "No module named 'no_such_module'" in (tmp_path / "warm.log").read_text()


async def test_a_failing_rehearsal_does_not_stop_the_server(mini: MiniSweAgent, tmp_path: Path) -> None:
    rehearsal = tmp_path / "rehearsal.py"
    rehearsal.write_text("def stage():\n    raise RuntimeError('no stage')\n")
    assert mini.preload is not None
    preload = Preload(mini.preload.python, "json:dumps", ("json",), (), rehearsal)
    server = ForkServer(preload, tmp_path / "sockets", tmp_path / "warm.log")
    server.start()
    server.stop()
    assert server.facts["learned"] == 0
    assert "no stage" in (tmp_path / "warm.log").read_text()


def test_a_fork_server_ends_with_a_host_that_is_killed(mini: MiniSweAgent, tmp_path: Path) -> None:
    host_script = (
        "import sys, time; from pathlib import Path; from gyre.harness.base import Preload\n"
        "from gyre.harness.forkserver import ForkServer\n"
        "folder = Path(sys.argv[2])\n"
        "s = ForkServer(Preload(Path(sys.argv[1]), 'json:dumps', ('json',)), folder / 'sockets', folder / 'warm.log')\n"
        "s.start(); print(s.pid, flush=True); time.sleep(600)"
    )
    assert mini.preload is not None
    host = subprocess.Popen(
        [sys.executable, "-c", host_script, str(mini.preload.python), str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert host.stdout is not None
    server = int(host.stdout.readline())
    assert shepherd.start_time(server) is not None
    host.kill()
    host.wait()
    host.stdout.close()
    until(lambda: shepherd.start_time(server) is None)
