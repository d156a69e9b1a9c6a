"""Claude Code, unmodified: its own `claude` binary from npm, headless. `[harness] name = "claude-code"`.

Written against 2.1.220 (the default) and 2.1.332. It speaks Anthropic Messages, streaming.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from gyre.gateway.dialect import Dialect, Hint, Kind, Plain
from gyre.gateway.messages import Message, Request, ToolCall, argument_value, difference
from gyre.harness import npm
from gyre.harness.base import BOX, HarnessError, Launch, LaunchContext, Preload, base_env
from gyre.harness.command import fill

PACKAGE = "@anthropic-ai/claude-code"
VERSION = "2.1.220"

AGENT_HEADER = "x-claude-code-agent-id"
SUMMARY = "CRITICAL: Respond with TEXT ONLY"
"""How the text begins with which it asks for a summary of a history that is to be compacted."""

PATIENCE_MS = "7200000"
"""A model call waits while cells change roles or weights move; the harness must see only time."""

# What it takes off a model's context before it compacts: room for an answer (at most the second number), and its own
# reserve.
RESERVE, LONGEST_ANSWER = 13_000, 20_000
# It takes no smaller window than this; a smaller context is said by another variable as well.
SMALLEST_WINDOW = 100_000
# A history must fit between prompt and threshold; below this it would compact over and over.
SMALLEST_THRESHOLD = 4_000

_FIXED_ENV = {
    "IS_SANDBOX": "1",  # it refuses to skip permissions as root without
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # no call home, no titles
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it changes with every sub-agent, and no prefix is shared
    "API_TIMEOUT_MS": PATIENCE_MS,
    "API_FORCE_IDLE_TIMEOUT": "0",
    "CLAUDE_STREAM_IDLE_TIMEOUT_MS": PATIENCE_MS,
    "CLAUDE_ENABLE_STREAM_WATCHDOG": "0",
    "CLAUDE_ENABLE_BYTE_WATCHDOG": "0",
    "CLAUDE_ASYNC_AGENT_STALL_TIMEOUT_MS": PATIENCE_MS,
    "CLAUDE_CODE_PRINT_BG_WAIT_CEILING_MS": PATIENCE_MS,  # it ends only after its background agents
    "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
    "CLAUDE_CODE_MAX_RETRIES": "100",  # a gateway that is restarted is waited for
}
# Every name under which it could ask for a model.
_MODEL_VARIABLES = (
    "ANTHROPIC_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_FABLE_MODEL",
)


class ClaudeCodeDialect(Plain):
    """Headers name the sub-agent; the request for a summary has a fixed beginning; side calls offer no tools.

    There is nothing to normalise: cache_control and the billing header are no part of a message.
    """

    name = "claude-code"

    def hint(self, headers: Mapping[str, str], request: Request) -> Hint:
        agent = headers.get(AGENT_HEADER, "")
        return Hint(_kind(agent, request), agent)

    def difference(self, emitted: Message, echoed: Message) -> str | None:
        reason = difference(emitted, echoed)
        if reason != "arguments_edited" or not all(map(_echoes, emitted.tool_calls, echoed.tool_calls)):
            return reason
        return difference(emitted, replace(echoed, tool_calls=emitted.tool_calls))


def _kind(agent: str, request: Request) -> Kind:
    if not request.tools:
        return "auxiliary"
    new = itertools.takewhile(lambda m: m.role != "assistant", reversed(request.messages))
    summary = any(m.role == "user" and SUMMARY in m.content for m in new)
    if agent:
        return "sub-agent-summary" if summary else "sub-agent"
    return "main-summary" if summary else "main"


def _echoes(emitted: ToolCall, echoed: ToolCall) -> bool:
    """Whether `echoed` is `emitted` as Claude Code writes it back: validated, defaults injected, lines trimmed."""
    if emitted.id != echoed.id or emitted.name != echoed.name:
        return emitted.name == echoed.name and emitted.arguments == echoed.arguments
    return _same(argument_value(emitted.arguments), argument_value(echoed.arguments))


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return all(key in theirs and _same(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, str) and isinstance(theirs, str):
        return _trimmed(ours) == _trimmed(theirs)
    if isinstance(ours, int | float) and isinstance(theirs, int | float) and bool not in (type(ours), type(theirs)):
        return ours == theirs or float(ours) == float(theirs)  # its numbers have 53 bits
    if isinstance(ours, str) and isinstance(theirs, bool | int | float):
        return ours.strip() == json.dumps(theirs)  # "2000" comes back as 2000, "false" as false
    return type(ours) is type(theirs) and bool(ours == theirs)


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.split("\n")).rstrip()


class ClaudeCode:
    """`claude -p <instruction>`, once a rollout, allowed to do everything in its workspace."""

    name = "claude-code"
    dialect: ClassVar[Dialect] = ClaudeCodeDialect()

    def __init__(
        self, config: Path | None, env: Mapping[str, str], args: Sequence[str] = (), version: str | None = None
    ) -> None:
        """`config` is a settings file of Claude Code's. Raises HarnessError where the binary is not installed."""
        if config is not None and config.suffix != ".json":
            raise HarnessError(f"harness.config: {config}: Claude Code's settings are a .json file")
        self._binary = npm.binary(npm.package(PACKAGE, version or VERSION), "@anthropic-ai", "claude-code-", "claude")
        self._settings = () if config is None else ("--settings", str(config.absolute()))
        self._env, self._args = dict(env), tuple(args)

    @property
    def preload(self) -> Preload | None:
        return None

    def command(self, ctx: LaunchContext) -> Launch:
        argv = (
            str(self._binary),
            "-p",
            *("--output-format", "stream-json", "--verbose"),
            "--dangerously-skip-permissions",
            *self._settings,
            *(fill(word, ctx) for word in self._args),
            "--",
            ctx.instruction,
        )
        box = ctx.rollout_dir / BOX
        env = {
            **base_env(box),
            **_FIXED_ENV,
            "SHELL": "/bin/bash",
            "CLAUDE_CODE_TMPDIR": str(box / "tmp"),
            "ANTHROPIC_BASE_URL": ctx.base_url,
            "ANTHROPIC_AUTH_TOKEN": ctx.api_key,
            **dict.fromkeys(_MODEL_VARIABLES, ctx.model),
            **compaction(ctx.context, ctx.max_tokens),
            **ctx.env,
            **{key: fill(value, ctx) for key, value in self._env.items()},
        }
        return Launch(argv, env, ctx.workspace)


def compaction(context: int, max_tokens: int) -> dict[str, str]:
    """What makes Claude Code compact its history before it outgrows `context` tokens (0: nothing is known).

    It does so above `min(context, window) - min(max_tokens, 20000) - 13000` tokens (measured on 2.1.220). A context
    that leaves too little of that is not told to it: then it compacts when the gateway refuses a prompt as too long.
    """
    out = {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(max_tokens)} if max_tokens else {}
    if context and context - min(max_tokens or LONGEST_ANSWER, LONGEST_ANSWER) - RESERVE >= SMALLEST_THRESHOLD:
        out["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(context)
        out["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(max(context, SMALLEST_WINDOW))
    return out
