"""Runs functions on several ranks: `python -m tests.training.ranks JOBS` imports once, and forks a process a rank."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import traceback
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Job = tuple[int, Callable[..., Any], tuple[Any, ...]]
"""Ranks, a module's own function, its arguments."""


def on_ranks(jobs: Sequence[Job], folder: Path, *, timeout_s: float = 900) -> list[Any]:
    """What each job's function gives on its rank 0, called on as many ranks, which find each other.

    Raises AssertionError with what the ranks wrote where one of them fails.
    """
    name = uuid.uuid4().hex
    given = folder / f"{name}.jobs"
    given.write_bytes(pickle.dumps([(n, function.__module__, function.__name__, args) for n, function, args in jobs]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.ranks", str(given)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return [pickle.loads(given.with_suffix(f".{i}").read_bytes()) for i in range(len(jobs))]


def main() -> int:
    import torch

    torch.set_num_threads(1)
    given = Path(sys.argv[1])
    jobs = pickle.loads(given.read_bytes())
    for _, module, _, _ in jobs:
        importlib.import_module(module)
    failed = 0
    for i, (world, module, name, arguments) in enumerate(jobs):
        function = getattr(importlib.import_module(module), name)
        os.environ |= {"WORLD_SIZE": str(world), "GYRE_TRAINER_RENDEZVOUS": str(given.with_suffix(f".{i}.file"))}
        children = []
        for rank in range(world):
            if (child := os.fork()) == 0:
                os._exit(_run(rank, function, arguments, given.with_suffix(f".{i}")))
            children.append(child)
        failed += sum(os.waitpid(child, 0)[1] != 0 for child in children)
    return 1 if failed else 0


def _run(rank: int, function: Callable[..., Any], arguments: tuple[Any, ...], result: Path) -> int:
    os.environ["RANK"] = str(rank)
    try:
        found = function(*arguments)
    except BaseException:
        print(f"rank {rank}:\n{traceback.format_exc()}", flush=True)
        return 1
    if rank == 0:
        result.write_bytes(pickle.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
