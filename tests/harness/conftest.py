from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gyre.harness import process, shepherd
from gyre.harness.base import BOX, Launch, LaunchContext, base_env
from gyre.harness.forkserver import ForkServer
from gyre.harness.mini_swe_agent import MiniSweAgent
from tests.harness.model import ScriptedModel

MINI_CONFIG = """
agent:
  system_template: "You work on a small repository with bash."
  instance_template: "{{ task | trim }}"
  step_limit: 8
  cost_limit: 0.0
environment:
  timeout: 30
model:
  model_class: litellm
  model_kwargs: {temperature: 1.0, max_tokens: 64}
"""


@pytest.fixture
def new_rollout(tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """Makes rollout folders; whatever still runs in one is ended after the test."""
    made: list[Path] = []

    def make() -> Path:
        folder = tmp_path / f"r{len(made)}"
        for name in ("workspace", "home", "tmp"):
            (folder / BOX / name).mkdir(parents=True)
        made.append(folder)
        return folder

    yield make
    process.end_all(tmp_path)


@pytest.fixture
def rollout(new_rollout: Callable[[], Path]) -> Path:
    return new_rollout()


@pytest.fixture(scope="session")
def mini(tmp_path_factory: pytest.TempPathFactory) -> MiniSweAgent:
    config = tmp_path_factory.mktemp("mini") / "mini.yaml"
    config.write_text(MINI_CONFIG)
    return MiniSweAgent(config, {})


@pytest.fixture(scope="session")
def fork_server(mini: MiniSweAgent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    folder = tmp_path_factory.mktemp("warm")
    assert mini.preload is not None
    server = ForkServer(mini.preload, folder / ("a-deep-data-folder-" * 8), folder / "warm.log")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    scripted = ScriptedModel(["pwd; ls", "echo hello > made.txt"])
    yield scripted
    scripted.close()


def sh(folder: Path, script: str) -> Launch:
    """A harness that is one line of shell."""
    return Launch(("/bin/sh", "-c", script), base_env(folder / BOX), folder / BOX / "workspace")


def mini_launch(mini: MiniSweAgent, model: ScriptedModel, folder: Path, token: str = "tok") -> Launch:
    return mini.command(
        LaunchContext(f"{model.url}/r/{token}", token, "policy", "Make made.txt", folder / BOX / "workspace", folder)
    )


def processes_in(folder: Path) -> list[int]:
    """Living processes whose current folder lies in `folder`: independent of the code under test."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and Path(os.readlink(f"/proc/{name}/cwd")).is_relative_to(folder.resolve()):
                found.append(int(name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return [pid for pid in found if shepherd.start_time(pid) is not None]


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)
