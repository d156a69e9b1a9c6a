"""Qwen Code, unmodified: its own command line from npm, headless. `[harness] name = "qwen-code"`.

Written against 0.24.4, on Node 22. It speaks OpenAI Chat, streaming.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from gyre.gateway.dialect import Dialect, Hint, Plain
from gyre.gateway.messages import Request
from gyre.harness import npm
from gyre.harness.base import BOX, HarnessError, Launch, LaunchContext, Preload, base_env
from gyre.harness.command import fill

PACKAGE = "@qwen-code/qwen-code"
VERSION = "0.24.4"

SUMMARY = "You are the component that summarizes"
"""How the text begins with which it asks for a summary of a history that is to be compacted."""
_SUBAGENT = re.compile(r"^You are an? [^.\n]{0,80}\bagent\b(?! for Qwen Code)", re.IGNORECASE)
# Work beside the task's: what is to be remembered or learnt for other sessions, hooks, verdicts.
_BESIDE = re.compile(
    r"^You are (?:now acting as the managed memory|performing a managed memory|selecting memories|reviewing this "
    r"conversation|evaluating a hook|an independent Goal Verifier|a security classifier)"
)

PATIENCE_MS = 7_200_000
"""A model call waits while cells change roles or weights move; the harness must see only time."""

_SETTINGS: dict[str, Any] = {
    "general": {"enableAutoUpdate": False},
    "privacy": {"usageStatisticsEnabled": False},
    "model": {"generationConfig": {"timeout": PATIENCE_MS, "maxRetries": 10}},
    "memory": {
        "enableManagedAutoMemory": False,
        "enableManagedAutoDream": False,
    },  # a rollout's home has no other session
    # Else it forgets what tools returned when a call took an hour: that hour is ours, not the agent's.
    "context": {"clearContextOnIdle": {"toolResultsThresholdMinutes": -1}},
}


class QwenCodeDialect(Plain):
    """No header says anything: sub-agents are known by their system text, a compaction by what it asks for."""

    name = "qwen-code"

    def hint(self, headers: Mapping[str, str], request: Request) -> Hint:
        system = request.messages[0].content if request.messages[0].role == "system" else ""
        sub = bool(_SUBAGENT.match(system))
        # A history that is too long for its own system text and tools is summarised without them.
        last = request.messages[-1]
        if system.startswith(SUMMARY) or (last.role == "user" and last.content.startswith(SUMMARY)):
            return Hint("sub-agent-summary" if sub else "main-summary")
        if not request.tools or _BESIDE.match(system):
            return Hint("auxiliary")
        return Hint("sub-agent") if sub else Hint()


class QwenCode:
    """`qwen -p <instruction>`, once a rollout, allowed to do everything in its workspace."""

    name = "qwen-code"
    dialect: ClassVar[Dialect] = QwenCodeDialect()

    def __init__(
        self, config: Path | None, env: Mapping[str, str], args: Sequence[str] = (), version: str | None = None
    ) -> None:
        """`config` is a settings.json of Qwen Code's, to which Gyre adds what it needs. Raises HarnessError."""
        self._script = npm.package(PACKAGE, version or VERSION) / "cli-entry.js"
        self._node = npm.node()
        self._own = {} if config is None else _settings(config)
        self._env, self._args = dict(env), tuple(args)

    @property
    def preload(self) -> Preload | None:
        return None

    def command(self, ctx: LaunchContext) -> Launch:
        argv = (
            str(self._node),
            str(self._script),
            *("--auth-type", "openai"),
            "-y",
            *("-o", "stream-json"),
            *(fill(word, ctx) for word in self._args),
            f"--prompt={ctx.instruction}",
        )
        box = ctx.rollout_dir / BOX
        base = base_env(box)
        env = {
            **base,
            "PATH": f"{self._node.parent}:{base['PATH']}",
            "SHELL": "/bin/bash",
            "QWEN_STREAM_IDLE_TIMEOUT_MS": str(PATIENCE_MS),
            "QWEN_STREAM_MAX_LIFETIME_MS": str(PATIENCE_MS),
            "OPENAI_BASE_URL": f"{ctx.base_url}/v1",
            "OPENAI_API_KEY": ctx.api_key,
            "OPENAI_MODEL": ctx.model,
            **ctx.env,
            **{key: fill(value, ctx) for key, value in self._env.items()},
        }
        settings = _merged(_merged(_SETTINGS, _window(ctx.context, ctx.max_tokens)), self._own)
        files = {box / "home" / ".qwen" / "settings.json": json.dumps(settings, indent=2)}
        return Launch(argv, env, ctx.workspace, files=files)


def _window(context: int, max_tokens: int) -> dict[str, Any]:
    """The policy's window (0: not known), by which it compacts, and the longest answer that is worth asking for."""
    generation: dict[str, Any] = {}
    if context:
        generation["contextWindowSize"] = context
    if max_tokens:
        generation["samplingParams"] = {"max_tokens": max_tokens}
    return {"model": {"generationConfig": generation}}


def _settings(config: Path) -> dict[str, Any]:
    if config.suffix != ".json":
        raise HarnessError(f"harness.config: {config}: Qwen Code's settings are a .json file")
    try:
        value = json.loads(config.read_bytes())
    except ValueError as error:
        raise HarnessError(f"harness.config: {config}: not JSON ({error}); comments are not taken here") from error
    if not isinstance(value, dict):
        raise HarnessError(f"harness.config: {config}: the settings must be a JSON object")
    return value


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, table by table."""
    out = dict(base)
    for key, value in over.items():
        below = out.get(key)
        out[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return out
