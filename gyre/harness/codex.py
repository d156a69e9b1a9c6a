"""Codex, unmodified: its own `codex` binary from npm, headless. `[harness] name = "codex"`.

Written against 0.171.0. It speaks OpenAI Responses, streaming.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from gyre.gateway.dialect import Dialect, Hint, Kind, Plain
from gyre.gateway.messages import Request
from gyre.harness import npm
from gyre.harness.base import BOX, HarnessError, Launch, LaunchContext, Preload, base_env
from gyre.harness.command import fill

PACKAGE = "@openai/codex"
VERSION = "0.171.0"

THREAD_HEADER, PARENT_HEADER, SUBAGENT_HEADER = "thread-id", "x-codex-parent-thread-id", "x-openai-subagent"
METADATA_HEADER = "x-codex-turn-metadata"

PATIENCE_MS = 7_200_000
"""A model call waits while cells change roles or weights move; the harness must see only time."""
RETRIES = 10
"""For requests and streams that fail; the time between two doubles, from 0.2 s on."""
TOOL_OUTPUT = 12_000
"""Tokens that must be free for what a tool returns: Codex cuts an output to about 10,000."""

# No call home, and no tool that OpenAI's servers would run.
_FIXED: dict[str, object] = {
    "analytics.enabled": False,
    "check_for_update_on_startup": False,
    "features.plugins": False,
    "features.apps": False,
    "web_search": "disabled",
    "model_provider": "gyre",
    "model_providers.gyre.name": "gyre",
    "model_providers.gyre.env_key": "OPENAI_API_KEY",
    "model_providers.gyre.wire_api": "responses",
    "model_providers.gyre.stream_idle_timeout_ms": PATIENCE_MS,
    "model_providers.gyre.request_max_retries": RETRIES,
    "model_providers.gyre.stream_max_retries": RETRIES,
}


class CodexDialect(Plain):
    """Headers say which thread speaks, whose sub-agent it is, and whether it compacts. What it echoes is exact."""

    name = "codex"

    def hint(self, headers: Mapping[str, str], request: Request) -> Hint:
        sub = PARENT_HEADER in headers or SUBAGENT_HEADER in headers
        agent = headers.get(THREAD_HEADER, "") if sub else ""
        kind = _kind(_metadata(headers), sub=sub, compact=bool(request.options.get("compact")))
        return Hint(kind, agent)


def _metadata(headers: Mapping[str, str]) -> dict[str, Any]:
    try:
        value = json.loads(headers.get(METADATA_HEADER, ""))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _kind(metadata: Mapping[str, Any], *, sub: bool, compact: bool) -> Kind | None:
    asked = metadata.get("request_kind")
    if compact or asked == "compaction":
        return "sub-agent-summary" if sub else "main-summary"
    if sub:
        return "sub-agent"
    return "main" if asked == "turn" else None


class Codex:
    """`codex exec <instruction>`, once a rollout, without its own sandbox."""

    name = "codex"
    dialect: ClassVar[Dialect] = CodexDialect()

    def __init__(
        self, config: Path | None, env: Mapping[str, str], args: Sequence[str] = (), version: str | None = None
    ) -> None:
        """`config` becomes its config.toml; what Gyre needs is said on the command line. Raises HarnessError."""
        if config is not None and config.suffix != ".toml":
            raise HarnessError(f"harness.config: {config}: Codex's settings are a .toml file")
        package = npm.package(PACKAGE, version or VERSION)
        self._binary = npm.binary(package, "@openai", "codex-", "vendor", "*", "bin", "codex")
        self._config = None if config is None else config.read_text(encoding="utf-8")
        self._env, self._args = dict(env), tuple(args)

    @property
    def preload(self) -> Preload | None:
        return None

    def command(self, ctx: LaunchContext) -> Launch:
        box = ctx.rollout_dir / BOX
        home = box / "home" / ".codex"
        settings = {
            **_FIXED,
            "model": ctx.model,
            "model_providers.gyre.base_url": f"{ctx.base_url}/v1",
            **compaction(ctx.context, ctx.max_tokens),
        }
        argv = (
            str(self._binary),
            "exec",
            "--json",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            # A JSON text or number is one of TOML's too.
            *(word for key, value in settings.items() for word in ("-c", f"{key}={json.dumps(value)}")),
            *(fill(word, ctx) for word in self._args),
            "--",
            ctx.instruction,
        )
        base = base_env(box)
        env = {
            **base,
            # Its own ripgrep, as its npm wrapper has it.
            "PATH": f"{base['PATH']}:{self._binary.parents[1] / 'codex-path'}",
            "SHELL": "/bin/bash",
            "CODEX_HOME": str(home),
            "OPENAI_API_KEY": ctx.api_key,
            **ctx.env,
            **{key: fill(value, ctx) for key, value in self._env.items()},
        }
        return Launch(argv, env, ctx.workspace, files={home / "config.toml": self._config or ""})


def compaction(context: int, max_tokens: int) -> dict[str, object]:
    """What makes Codex compact its history in time (context 0: nothing is known).

    It looks at its history only after an answer, and a prompt that is refused as too long ends its run. So between the
    threshold and the context there is room for one more answer and an output of a tool, where the context allows it.
    """
    if not context:
        return {}
    threshold = max(min(context - max_tokens - TOOL_OUTPUT, int(0.9 * context)), context // 2)
    return {"model_context_window": context, "model_auto_compact_token_limit": threshold}
