"""A harness that hides its environment is still found, by its shepherd's pid file; strangers are left alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from gyre.cli.stackfile import start_ticks
from workers.stack.sweep import sweep

NAP = [sys.executable, "-c", "import time; time.sleep(60)"]


def note(data: Path, rollout: str, pid: int, start: int | None, *, ended: bool = False) -> None:
    folder = data / "rollouts" / rollout
    folder.mkdir(parents=True)
    (folder / "pid.json").write_text(json.dumps({"pid": pid, "start_time": start}))
    if ended:
        (folder / "exit.json").write_text("{}")


def test_pid_files_name_living_harnesses_only(tmp_path: Path) -> None:
    hidden, another, ended, strange = (subprocess.Popen(NAP, env={}) for _ in range(4))
    try:
        note(tmp_path, "run/s0/00/00", hidden.pid, start_ticks(hidden.pid))
        note(tmp_path, "run/s0/00/01", another.pid, 1)  # the pid was given to another process since
        note(tmp_path, "run/s0/00/02", ended.pid, start_ticks(ended.pid), ended=True)
        note(tmp_path, "run/s0/00/03/box/workspace", strange.pid, start_ticks(strange.pid))  # an agent's wish
        (tmp_path / "rollouts" / "pid.json").write_text("an agent may write anything")
        assert sweep(tmp_path, grace_s=5.0) == {hidden.pid}
        assert another.poll() is None
        assert ended.poll() is None
        assert strange.poll() is None
    finally:
        for process in (hidden, another, ended, strange):
            process.kill()
            process.wait()


def test_the_data_folder_in_the_environment_marks_a_process_and_all_below_it(tmp_path: Path) -> None:
    child = f"import subprocess; subprocess.run({NAP!r}, env={{}})"
    other = subprocess.Popen(NAP, env={"GYRE_DATA": str(tmp_path) + "x"})
    marked = subprocess.Popen([sys.executable, "-c", child], env={"GYRE_DATA": str(tmp_path)})
    try:
        met = sweep(tmp_path, grace_s=0.5)
        assert marked.pid in met
        assert other.poll() is None
    finally:
        for process in (marked, other):
            process.kill()
            process.wait()
