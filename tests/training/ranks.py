"""Runs a function on several ranks, each a process of its own: `python -m tests.training.ranks ARGUMENTS RESULT`."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")


def on_ranks(world: int, folder: Path, function: Callable[..., Any], *arguments: Any, timeout_s: float = 300) -> Any:
    """What `function(*arguments)`, a module's own, gives on rank 0, called on `world` ranks that can find each other.

    Raises AssertionError with the end of a log where a rank fails.
    """
    name = uuid.uuid4().hex
    given, result = folder / f"{name}.in", folder / f"{name}.out"
    given.write_bytes(pickle.dumps((function.__module__, function.__qualname__, arguments)))
    shared = {"WORLD_SIZE": str(world), "GYRE_TRAINER_RENDEZVOUS": str(folder / name), "OMP_NUM_THREADS": "1"}
    running = []
    for rank in range(world):
        with (folder / f"{name}.{rank}.log").open("wb") as log:
            argv = [sys.executable, "-m", "tests.training.ranks", str(given), str(result)]
            env = {**os.environ, **shared, "RANK": str(rank)}
            running.append(subprocess.Popen(argv, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout_s) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    logs = [(folder / f"{name}.{rank}.log").read_text()[-3000:] for rank in range(world)]
    assert not any(codes), "\n\n".join(f"rank {rank} ended with {codes[rank]}:\n{logs[rank]}" for rank in range(world))
    return pickle.loads(result.read_bytes())


def main() -> None:
    import torch

    torch.set_num_threads(1)
    module, name, arguments = pickle.loads(Path(sys.argv[1]).read_bytes())
    found = getattr(importlib.import_module(module), name)(*arguments)
    if os.environ["RANK"] == "0":
        Path(sys.argv[2]).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
