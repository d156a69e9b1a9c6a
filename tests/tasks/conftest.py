from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gyre.harness import process
from gyre.tasks.harbor import Task, load_task

TOML = """
schema_version = "1.4"
[task]
name = "test/one"
[metadata]
family = "edit"
difficulty = "easy"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 60.0
env = { LEVEL = "2" }
[environment]
cpus = 1
env = { COLOR = "blue" }
"""


def write(folder: Path, files: dict[str, str]) -> Path:
    """Write files given by relative path; a name that ends in '*' is made executable."""
    for name, text in files.items():
        path = folder / name.rstrip("*")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if name.endswith("*"):
            path.chmod(0o755)
    return folder


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., Task]:
    """make_task(test_sh, **more files) -> a loaded task with a small workspace."""

    def make(test_sh: str = "echo 1 > $LOGS_DIR/reward.txt", files: dict[str, str] | None = None) -> Task:
        folder = write(
            tmp_path / "task",
            {
                "task.toml": TOML,
                "instruction.md": "Do it.\n",
                "environment/workspace/a.txt": "a\n",
                "environment/workspace/bin/run.sh*": "#!/bin/sh\n",
                "tests/test.sh": f"#!/bin/sh\n{test_sh}\n",
                **(files or {}),
            },
        )
        return load_task(folder)

    return make


@pytest.fixture
def rollout(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "rollout"
    process.end_all(tmp_path)
