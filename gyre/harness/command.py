"""Any program as a harness: `[harness] name = "command"`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from gyre.gateway.dialect import PLAIN, Dialect
from gyre.harness.base import BOX, Launch, LaunchContext, Preload, base_env


def fill(text: str, ctx: LaunchContext) -> str:
    """Replace `{base_url}`, `{api_key}`, `{model}`, `{instruction}`, `{workspace}`; other braces stay as they are."""
    values = {
        "base_url": ctx.base_url,
        "api_key": ctx.api_key,
        "model": ctx.model,
        "workspace": str(ctx.workspace),
        "instruction": ctx.instruction,  # last: what an instruction says is never filled in
    }
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text


class CommandHarness:
    """A program given by its argv; it gets the gateway's URL in the usual variables as well."""

    dialect: ClassVar[Dialect] = PLAIN

    def __init__(self, argv: list[str], env: Mapping[str, str], name: str = "command") -> None:
        self.name = name
        self._argv = tuple(argv)
        self._env = dict(env)

    @property
    def preload(self) -> Preload | None:
        return None

    def command(self, ctx: LaunchContext) -> Launch:
        env = {
            **base_env(ctx.rollout_dir / BOX),
            "OPENAI_BASE_URL": f"{ctx.base_url}/v1",
            "OPENAI_API_KEY": ctx.api_key,
            **ctx.env,
            **{key: fill(value, ctx) for key, value in self._env.items()},
        }
        return Launch(tuple(fill(word, ctx) for word in self._argv), env, ctx.workspace)
