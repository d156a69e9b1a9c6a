"""Our hooks into SGLang must take: it only logs one that does not, and its server would be slow, or wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ADVICE = "install the SGLang that requirements/ pins (`make setup`)"


def insist() -> None:
    """End this process, in one line that names the hooks, where SGLang is about to apply them and cannot."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    apply = HookRegistry.apply_hooks

    def apply_all() -> None:
        apply()
        lost = [target for target in _ours(HookRegistry._hooks) if target not in HookRegistry._patched]
        if lost:
            raise SystemExit(f"gyre: SGLang has nothing to hook at {', '.join(sorted(lost))}; {ADVICE}")

    HookRegistry.apply_hooks = apply_all


def _ours(hooks: dict[str, list[tuple[Any, Callable[..., Any], Any]]]) -> list[str]:
    return [target for target, found in hooks.items() if any(h.__module__.startswith("gyre.") for _, h, _ in found)]
