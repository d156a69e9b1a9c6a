"""compose.yaml describes the same processes as the local stack."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gyre.config import load_run_config
from workers.settings import WorkerSettings
from workers.stack.ports import NAMES
from workers.stack.services import TEMPORAL_CLI, TEMPORAL_SETTINGS, StackPlan, run_stages

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    return found


def compose_client() -> list[str] | None:
    if shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


def test_the_client_accepts_it() -> None:
    client = compose_client()
    if client is None:
        pytest.skip("neither `docker compose` nor docker-compose is installed; the checks below read the file as YAML")
    done = subprocess.run([*client, "-f", str(ROOT / "compose.yaml"), "config"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_process_of_the_local_stack_is_a_service(services: dict[str, Any], tmp_path: Path) -> None:
    run = load_run_config(ROOT / "examples" / "quickstart" / "run.toml")
    plan = StackPlan(tmp_path, dict.fromkeys(NAMES, 1), tmp_path / "run.json", run)
    for spec in (spec for stage in run_stages(plan) for spec in stage):
        assert spec.name in services
        if "-m" in spec.argv and spec.name != "postgres":
            module = spec.argv[spec.argv.index("-m") :]
            assert services[spec.name]["command"][1 : 1 + len(module)] == module


def test_modules_dependencies_and_environment_exist(services: dict[str, Any]) -> None:
    for name, service in services.items():
        command = service.get("command", [])
        if "-m" in command:
            assert importlib.util.find_spec(command[command.index("-m") + 1]), name
            WorkerSettings.from_env(service["environment"])
        assert set(service.get("depends_on", {})) <= services.keys(), name
        assert service.get("network_mode", "service:temporal") == "service:temporal"


def test_temporal_runs_with_the_same_settings(services: dict[str, Any]) -> None:
    command = services["temporal"]["command"]
    assert [c.partition("=")[2] for c in command if c.startswith("--dynamic-config-value=")] == list(TEMPORAL_SETTINGS)
    assert f"--db-filename=/data/temporal-{TEMPORAL_CLI}.db" in command


def test_an_agent_that_was_replaced_is_not_started_again(services: dict[str, Any]) -> None:
    """It would take the cell back from its successor. Compose starts what ends, whatever its exit code."""
    agents = [service for service in services.values() if "workers.cell_agent" in service.get("command", [])]
    assert len(agents) == 2
    for agent in agents:
        assert agent["restart"] in ("unless-stopped", "always") and "--stay" in agent["command"]
