"""mini-swe-agent, unmodified: its own `mini` command in its own virtual environment.

Written against 2.4.6. It speaks OpenAI Chat through litellm, non-streaming, with one tool (`bash`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from gyre.gateway.dialect import PLAIN, Dialect
from gyre.harness.base import BOX, HarnessError, Launch, LaunchContext, Preload, base_env, places
from gyre.harness.command import fill

PYTHON_VARIABLE = "GYRE_MINI_PYTHON"
DEFAULT_PYTHON = Path(".venvs/mini/bin/python")

CALL_TIMEOUT_S = 7200
"""A model call waits while cells change roles or weights move; the harness must see only time."""

TRAJECTORY_FILE = "trajectory.json"

# litellm and mini-swe-agent read most of these when they are imported, so a fork-server needs them as well.
_FIXED_ENV = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "TYPER_STANDARD_TRACEBACK": "1",  # the decorated one costs a run that fails seconds of CPU
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


def mini_python() -> Path:
    """The interpreter that has mini-swe-agent: $GYRE_MINI_PYTHON, else `.venvs/mini/bin/python` of the repository.

    Raises HarnessError when it is not there.
    """
    candidates = places(PYTHON_VARIABLE, DEFAULT_PYTHON)
    for python in candidates:
        if python.exists():
            return python
    raise HarnessError(
        f"mini-swe-agent: no interpreter at {candidates[0]}; run `make setup`, or set {PYTHON_VARIABLE} to the python "
        "of an environment that has mini-swe-agent"
    )


class MiniSweAgent:
    """`mini -m openai/<model> -t <instruction> -y --exit-immediately`, once a rollout."""

    name = "mini-swe-agent"
    dialect: ClassVar[Dialect] = PLAIN  # one agent, one strict conversation: nothing to tell

    def __init__(self, config: Path | None, env: Mapping[str, str], *, warm: bool = True) -> None:
        """`config` is mini-swe-agent's own YAML file (None: its built-in mini.yaml). Raises HarnessError."""
        if config is not None and (config.suffix != ".yaml" or "=" in str(config)):
            raise HarnessError(
                f"harness.config: {config}: mini-swe-agent takes a path that ends in .yaml and has no '='; rename it"
            )
        self._python = mini_python()
        self._script = self._python.with_name("mini")
        if not self._script.exists():
            raise HarnessError(
                f"mini-swe-agent: {self._python} has no `mini` beside it; "
                f"run `{self._python} -m pip install mini-swe-agent==2.4.6`"
            )
        self._config = "mini.yaml" if config is None else str(config.absolute())
        self._env = dict(env)
        self._warm = warm

    @property
    def preload(self) -> Preload | None:
        if not self._warm:
            return None
        return Preload(
            python=self._python,
            entry="minisweagent.run.mini:app",
            modules=(
                "minisweagent.run.mini",
                "minisweagent.models.litellm_model",
                "minisweagent.environments.local",
                "minisweagent.agents.interactive",
            ),
            env=tuple(_FIXED_ENV.items()),
            rehearsal=Path(__file__).with_name("mini_rehearsal.py"),
        )

    def command(self, ctx: LaunchContext) -> Launch:
        argv = (
            str(self._python),
            str(self._script),
            *("-m", f"openai/{ctx.model}"),
            *("-c", self._config),
            *("-c", f"model.model_kwargs.timeout={CALL_TIMEOUT_S}"),
            *("-t", ctx.instruction),
            "-y",
            "--exit-immediately",
            *("-o", str(ctx.rollout_dir / TRAJECTORY_FILE)),
        )
        env = {
            **base_env(ctx.rollout_dir / BOX),
            **_FIXED_ENV,
            "PYTHONUNBUFFERED": "1",
            "MSWEA_GLOBAL_CONFIG_DIR": str(ctx.rollout_dir / BOX / "home" / ".config" / "mini-swe-agent"),
            "OPENAI_API_BASE": f"{ctx.base_url}/v1",
            "OPENAI_BASE_URL": f"{ctx.base_url}/v1",
            "OPENAI_API_KEY": ctx.api_key,
            **ctx.env,
            **{key: fill(value, ctx) for key, value in self._env.items()},
        }
        return Launch(argv, env, ctx.workspace, self.preload)
