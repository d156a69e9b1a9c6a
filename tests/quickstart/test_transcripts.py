"""Synthetic transcripts print what the commands print, and are right exactly where they say so."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import make_tasks
from transcripts import WAYS, Transcript, transcript


def _replay(told: Transcript, folder: Path) -> float:
    task = told.task
    make_tasks.write_task(task, "replayed", folder)
    workspace = folder / "environment/workspace"
    shell = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
    for turn in told.turns:
        done = subprocess.run(turn.command, shell=True, cwd=workspace, env=shell, capture_output=True, text=True)
        assert ((done.stdout + done.stderr).strip(), done.returncode) == (turn.output.strip(), turn.code), turn
    env = shell | {"APP_DIR": str(workspace), "TESTS_DIR": str(folder / "tests"), "LOGS_DIR": str(folder / "logs")}
    subprocess.run(["sh", str(folder / "tests/test.sh")], cwd=workspace, env=env, check=True)
    return float((folder / "logs/reward.txt").read_text())


def test_transcripts_are_true(tmp_path: Path) -> None:
    rng = random.Random(99)
    for number in range(120):
        told = transcript(rng)
        reward = _replay(told, tmp_path / str(number))
        # A guess may happen to be right; a right way never fails.
        assert reward == 1 if told.right else reward <= 1, (told.task.instruction, told.turns, reward)


def test_every_family_has_right_and_flawed_ways() -> None:
    rng = random.Random(5)
    for family, ways in WAYS.items():
        drawn = ways(make_tasks.FAMILIES[family](rng), rng)
        right = sum(way.weight for way in drawn if way.right) / sum(way.weight for way in drawn)
        assert 0.25 < right < 0.5, family
