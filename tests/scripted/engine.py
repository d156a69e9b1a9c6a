"""A real SGLang server whose policy follows scripts, and what its scheduler got and gave."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from gyre.config import CellConfig, ServingConfig
from gyre.serving.launch import EngineProcess
from tests.scripted.policy import CONTEXT

SERVING = ServingConfig(max_running=16, kv_tokens=400_000, request_timeout_s=60.0)
_numbers = itertools.count()


@dataclass
class Exchange:
    """One request as the scheduler saw it. `finish` is None where the engine died first."""

    rid: str
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    finish: str | None = None


class ScriptedEngine(EngineProcess):
    """`EngineProcess` over a folder of `write_policy`. Scripts are shared by all engines with the same `scripts`."""

    def __init__(self, folder: Path, policy: Path, scripts: Path, name: str = "c0") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        scripts.mkdir(parents=True, exist_ok=True)
        super().__init__(SERVING, CellConfig(name=name), folder / f"{name}.log", context=CONTEXT)
        self.policy, self.scripts = policy, scripts
        self.record = folder / f"{name}.jsonl"
        self.version = 0
        """Policy version that it was told to serve."""

    def start(self, policy_path: Path | None = None, version: int = 0) -> None:
        """As `EngineProcess.start`; the record goes on in the same file."""
        root = str(Path(__file__).parents[2])
        with _environment(
            SGLANG_EXTERNAL_MODEL_PACKAGE="tests.scripted.models",
            PYTHONPATH=os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
            GYRE_SCRIPTED_POLICY=str(self.policy),
            GYRE_SCRIPTS=str(self.scripts),
            GYRE_SCRIPTED_LOG=str(self.record),
        ):
            super().start(policy_path or self.policy, version)
        self.version = version

    def script(self, steps: list[dict[str, Any]], **rest: Any) -> str:
        """Store a script; returns its marker, to be put into the task's text. No two have the same."""
        return add_script(self.scripts, steps, **rest)

    def exchanges(self) -> list[Exchange]:
        """All requests of which the scheduler sampled a token, in the order of their first tokens."""
        found: dict[str, Exchange] = {}
        for line in self.record.read_bytes().splitlines():
            entry = orjson.loads(line)
            if "prompt" in entry:
                found[entry["rid"]] = Exchange(entry["rid"], entry["prompt"])
                continue
            one = found[entry["rid"]]
            assert entry["at"] <= len(one.output)
            del one.output[entry["at"] :]  # an engine that is paused by `retract` may take back what it did not send
            one.output += entry["ids"]
            one.finish = entry["finish"]
        return list(found.values())


def add_script(scripts: Path, steps: list[dict[str, Any]], **rest: Any) -> str:
    """Store a script in the folder that engines read; returns its marker."""
    name = f"s{os.getpid()}x{next(_numbers)}"
    (scripts / f"{name}.json").write_text(json.dumps({"steps": steps, **rest}))
    return f"SCRIPT@{name}"


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
