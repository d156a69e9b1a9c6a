"""From the run file's [harness] table to a harness."""

from __future__ import annotations

from collections.abc import Callable

from gyre.config.run import HarnessConfig
from gyre.gateway.dialect import Dialect
from gyre.harness.base import Harness, HarnessError
from gyre.harness.claude_code import ClaudeCode
from gyre.harness.codex import Codex
from gyre.harness.command import CommandHarness
from gyre.harness.declared_dialect import DeclaredDialect
from gyre.harness.mini_swe_agent import MiniSweAgent
from gyre.harness.qwen_code import QwenCode

_MAKERS: dict[str, Callable[[HarnessConfig], Harness]] = {
    "mini-swe-agent": lambda config: MiniSweAgent(config.config, config.env, warm=config.warm),
    "claude-code": lambda config: ClaudeCode(config.config, config.env, config.args, config.version),
    "qwen-code": lambda config: QwenCode(config.config, config.env, config.args, config.version),
    "codex": lambda config: Codex(config.config, config.env, config.args, config.version),
    "command": lambda config: CommandHarness(config.command, config.env, config.files),
}


_DIALECTS: dict[str, Dialect] = {
    "mini-swe-agent": MiniSweAgent.dialect,
    "claude-code": ClaudeCode.dialect,
    "qwen-code": QwenCode.dialect,
    "codex": Codex.dialect,
}


def dialect_of(config: HarnessConfig) -> Dialect:
    """The dialect of the harness that `config` names; the harness need not be installed where this is asked.

    Raises HarnessError for an unknown name.
    """
    if config.name == "command":
        return DeclaredDialect(config.dialect)
    if config.name not in _DIALECTS:
        raise _unknown(config)
    return _DIALECTS[config.name]


def make_harness(config: HarnessConfig) -> Harness:
    """The harness that `config` names. Raises HarnessError: unknown name, or something that it needs is missing."""
    if config.name not in _MAKERS:
        raise _unknown(config)
    return _MAKERS[config.name](config)


def _unknown(config: HarnessConfig) -> HarnessError:
    return HarnessError(f"harness.name: no harness is named {config.name!r}; known are {', '.join(_MAKERS)}")
