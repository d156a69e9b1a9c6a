"""Any program as a harness: `[harness] name = "command"`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from gyre.gateway.dialect import PLAIN, Dialect
from gyre.harness.base import BOX, Launch, LaunchContext, Preload, base_env


def fill(text: str, ctx: LaunchContext) -> str:
    """Replace `{base_url}`, `{api_key}`, `{model}`, `{workspace}`, `{home}`, `{context}`, `{max_tokens}` and
    `{instruction}`; other braces stay as they are."""
    values = {
        "base_url": ctx.base_url,
        "api_key": ctx.api_key,
        "model": ctx.model,
        "workspace": str(ctx.workspace),
        "home": str(ctx.rollout_dir / BOX / "home"),
        "context": str(ctx.context),
        "max_tokens": str(ctx.max_tokens),
        "instruction": ctx.instruction,  # last: what an instruction says is never filled in
    }
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text


class CommandHarness:
    """A program given by its argv; it gets the gateway's URL in the usual variables as well.

    `files` are settings files below its home folder: relative path to text.
    """

    dialect: ClassVar[Dialect] = PLAIN

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], files: Mapping[str, str] | None = None, name: str = "command"
    ) -> None:
        self.name = name
        self._argv = tuple(argv)
        self._env = dict(env)
        self._files = dict(files or {})

    @property
    def preload(self) -> Preload | None:
        return None

    def command(self, ctx: LaunchContext) -> Launch:
        box = ctx.rollout_dir / BOX
        env = {
            **base_env(box),
            "OPENAI_BASE_URL": f"{ctx.base_url}/v1",
            "OPENAI_API_BASE": f"{ctx.base_url}/v1",
            "OPENAI_API_KEY": ctx.api_key,
            "OPENAI_MODEL": ctx.model,
            "ANTHROPIC_BASE_URL": ctx.base_url,
            "ANTHROPIC_API_KEY": ctx.api_key,
            "ANTHROPIC_MODEL": ctx.model,
            **ctx.env,
            **{key: fill(value, ctx) for key, value in self._env.items()},
        }
        files = {box / "home" / path: fill(text, ctx) for path, text in self._files.items()}
        return Launch(tuple(fill(word, ctx) for word in self._argv), env, ctx.workspace, files=files)
