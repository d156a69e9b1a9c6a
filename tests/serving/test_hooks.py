"""Hooks into SGLang are in their place, or no server starts: one without them would be slow and say nothing."""

from __future__ import annotations

import subprocess
import sys

LOAD = """
from gyre.serving.cpu_platform import attention, define_torchvision_ops, hooks
define_torchvision_ops()
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
{before}
from sglang.srt.plugins import load_plugins
load_plugins()
inside = [c.cell_contents for c in TorchNativeAttnBackend._run_sdpa_forward_extend.__closure__]
print("attention of new tokens" if attention.extend in inside else inside)
"""


def load(before: str = "") -> subprocess.CompletedProcess[str]:
    """Load the plugins as each process of a server does, after `before`."""
    script = LOAD.format(before=before)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)


def test_attention_of_new_tokens_is_in_its_place() -> None:
    loaded = load()
    assert (loaded.returncode, loaded.stdout) == (0, "attention of new tokens\n"), loaded.stderr


def test_a_hook_that_finds_nothing_ends_the_process() -> None:
    loaded = load("del TorchNativeAttnBackend._run_sdpa_forward_extend")
    said = (
        "gyre: SGLang has nothing to hook at sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend."
        "_run_sdpa_forward_extend; install the SGLang that requirements/ pins (`make setup`)"
    )
    assert (loaded.returncode, loaded.stderr.splitlines()[-1]) == (1, said)


def test_hooks_that_cannot_be_registered_end_the_process() -> None:
    loaded = load("from sglang.srt.mem_cache.pool_host import common; del common.ALLOC_MEMORY_FUNCS")
    assert loaded.returncode == 1
    assert loaded.stderr.splitlines()[-1].startswith(
        "gyre: no hooks for SGLang: ImportError: cannot import name 'ALLOC"
    )
