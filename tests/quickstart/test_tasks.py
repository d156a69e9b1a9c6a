"""The committed task folders: remade byte for byte, solvable, not solved already, and kept apart."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import make_tasks
import pytest
from families import FAMILIES
from words import WORDS

TASKS = Path(make_tasks.__file__).parent / "tasks"
FOLDERS = sorted(TASKS.glob("*/*"))


def _contents(root: Path) -> dict[str, tuple[bytes, bool]]:
    return {
        str(path.relative_to(root)): (path.read_bytes(), os.access(path, os.X_OK))
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def _grade(task: Path, workspace: Path, logs: Path) -> float:
    env = {
        "PATH": os.environ["PATH"],
        "APP_DIR": str(workspace),
        "TESTS_DIR": str(task / "tests"),
        "LOGS_DIR": str(logs),
    }
    subprocess.run(["sh", str(task / "tests/test.sh")], cwd=workspace, env=env, check=True, timeout=120)
    return float((logs / "reward.txt").read_text())


def test_committed_tasks_are_what_the_script_writes(tmp_path: Path) -> None:
    make_tasks.main(tmp_path)
    assert _contents(tmp_path) == _contents(TASKS)


def test_enough_tasks_of_every_family() -> None:
    counts = {s: [p.name.rsplit("-", 1)[0] for p in (TASKS / s).iterdir()] for s in ("train", "heldout")}
    assert len(counts["train"]) == 96 and len(counts["heldout"]) == 32
    for names in counts.values():
        assert set(names) == set(FAMILIES)
        assert max(map(names.count, FAMILIES)) - min(map(names.count, FAMILIES)) <= 1


def test_no_instruction_occurs_twice() -> None:
    instructions = [(folder / "instruction.md").read_text() for folder in FOLDERS]
    assert len(set(instructions)) == len(instructions) == 128


def test_no_word_hides_in_another() -> None:
    assert len(set(WORDS)) == len(WORDS)
    assert [(a, b) for a in WORDS for b in WORDS if a != b and a in b] == []


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_solution_earns_one_and_the_untouched_workspace_less(split: str, tmp_path: Path) -> None:
    for task in sorted((TASKS / split).iterdir()):
        meta = tomllib.loads((task / "task.toml").read_text())
        assert meta["schema_version"] == "1.4" and meta["task"]["name"] == f"quickstart/{task.name}"
        workspace = tmp_path / task.name / "app"
        shutil.copytree(task / "environment/workspace", workspace)
        assert 0 <= _grade(task, workspace, tmp_path / task.name / "before") < 1, task
        env = {"PATH": os.environ["PATH"], "APP_DIR": str(workspace)}
        subprocess.run(["sh", str(task / "solution/solve.sh")], env=env, check=True, timeout=120)
        assert _grade(task, workspace, tmp_path / task.name / "after") == 1, task
