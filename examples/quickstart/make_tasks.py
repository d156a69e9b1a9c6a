"""Writes the quickstart's tasks as Harbor task folders: ``python make_tasks.py [folder]``.

The same seed always writes the same bytes. Training and held-out tasks come from one stream, and no two tasks share
an instruction.
"""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

from families import FAMILIES, Task

SEED = 20
TRAIN, HELDOUT = 96, 32

_DOCKERFILE = "FROM python:3.11-slim\nWORKDIR /app\nCOPY workspace/ /app/\n"

_TASK_TOML = """\
schema_version = "1.4"

[task]
name = "quickstart/{name}"

[metadata]
family = "{family}"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 60.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 512
storage_mb = 1024
"""

# A container is not needed to run it: the three folders can be given.
_TEST_HEAD = """\
#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
"""
_TEST_TAIL = 'echo "$reward" > "$logs/reward.txt"\n'


def draw(seed: int, count: int) -> list[Task]:
    """``count`` tasks, dealt over the families in turn, with distinct instructions."""
    rng = random.Random(seed)
    makers = list(FAMILIES.values())
    tasks: list[Task] = []
    seen: set[str] = set()
    while len(tasks) < count:
        task = makers[len(tasks) % len(makers)](rng)
        if task.instruction not in seen:
            seen.add(task.instruction)
            tasks.append(task)
    return tasks


def write_task(task: Task, name: str, folder: Path) -> None:
    """Writes one Harbor task folder; ``folder`` must not exist."""
    texts = {
        "instruction.md": task.instruction + "\n",
        "task.toml": _TASK_TOML.format(name=name, family=task.family),
        "environment/Dockerfile": _DOCKERFILE,
        "tests/test.sh": _TEST_HEAD + task.test + _TEST_TAIL,
        "solution/solve.sh": f'#!/bin/sh\ncd "${{APP_DIR:-/app}}" || exit 1\n{task.solution}\n',
    }
    texts |= {f"environment/workspace/{path}": text for path, text in task.files.items()}
    texts |= {f"tests/expected/{path}": text for path, text in task.expected.items()}
    for path, text in texts.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        if file.suffix == ".sh":
            file.chmod(0o755)


def main(root: Path) -> None:
    """Writes ``root/train`` and ``root/heldout`` anew."""
    tasks = draw(SEED, TRAIN + HELDOUT)
    for split, part in (("train", tasks[:TRAIN]), ("heldout", tasks[TRAIN:])):
        if (root / split).exists():
            shutil.rmtree(root / split)
        for number, task in enumerate(part):
            name = f"{task.family}-{number:03d}"
            write_task(task, name, root / split / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "tasks")
