"""From the run file's [harness] table to a harness."""

from __future__ import annotations

from collections.abc import Callable

from gyre.config.run import HarnessConfig
from gyre.harness.base import Harness, HarnessError
from gyre.harness.command import CommandHarness
from gyre.harness.mini_swe_agent import MiniSweAgent

_MAKERS: dict[str, Callable[[HarnessConfig], Harness]] = {
    "mini-swe-agent": lambda config: MiniSweAgent(config.config, config.env, warm=config.warm),
    "command": lambda config: CommandHarness(config.command, config.env),
}


def make_harness(config: HarnessConfig) -> Harness:
    """The harness that `config` names. Raises HarnessError: unknown name, or something that it needs is missing."""
    if config.name not in _MAKERS:
        raise HarnessError(f"harness.name: no harness is named {config.name!r}; known are {', '.join(_MAKERS)}")
    return _MAKERS[config.name](config)
