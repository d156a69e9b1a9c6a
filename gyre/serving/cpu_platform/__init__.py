"""SGLang on a plain CPU build of torch, unmodified, through its official out-of-tree platform hook.

SGLang finds the two functions here by entry points of our distribution (`sglang.srt.platforms` and
`sglang.srt.plugins`). What is for CPU does nothing where CUDA is available: one installation serves both kinds.
"""

from __future__ import annotations

PLATFORM = "gyre.serving.cpu_platform.platform:CpuTorchPlatform"


def define_torchvision_ops() -> None:
    """Define the schemas of `torchvision::nms` and `qnms` unless they exist.

    The torchvision wheel on PyPI is a CUDA build: its C operators cannot load next to a CPU torch, yet its Python side,
    which transformers imports, needs their schemas. Call this before transformers or SGLang is imported on CPU.
    """
    import torch

    for name in ("nms", "qnms"):
        if hasattr(torch.ops.torchvision, name):
            continue
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _on_cpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: the platform's qualified name, or None where CUDA is available."""
    if not _on_cpu():
        return None
    define_torchvision_ops()
    return PLATFORM


def hooks() -> None:
    """Entry point of `sglang.srt.plugins`: what the CPU platform needs beside its class, and what our storage does.

    Ends the process where that fails: of a plugin that raises, SGLang says so in its log and starts without it.
    """
    try:
        _register()
    except Exception as error:
        from gyre.serving.hooked import ADVICE

        raise SystemExit(f"gyre: no hooks for SGLang: {type(error).__name__}: {error}; {ADVICE}") from error


def _register() -> None:
    from gyre.serving import hooked, kv_hooks

    hooked.insist()
    kv_hooks.register()
    if _on_cpu():
        from gyre.serving.cpu_platform.hooks import register

        register()
