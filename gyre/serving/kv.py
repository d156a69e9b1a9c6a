"""Whether a cell's keys and values outlive their call's move to another cell, and how (docs/architecture.md).

A prefix that one cell computed is written to a folder that all cells of the machine share, and read there by the cell
that gets the rollout's next call, where reading is estimated to beat computing. Decided when a server starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import stat
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
import torch.nn.functional as nn

from gyre.config import CellConfig, ServingConfig
from gyre.serving.kv_cost import (
    FIXED_S,
    PAGE_TOKENS,
    FetchCost,
    KvShape,
    Prefill,
    PrefillCost,
    decide,
    fit,
    least_tokens,
)
from gyre.serving.kv_pages import FolderUse, PageFolder

log = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")
"""Where pages lie in memory, if there is room."""

CUDA_FLOPS = 3e14
"""Multiplications and additions a second that one CUDA device is taken to reach in a prefill. An assumption (bfloat16
on a Hopper card), not measured: the agent opens no context on a device that is the server's."""

CUDA_RESERVE = 10 << 30
"""Memory that SGLang keeps free beside the pages it holds for a CUDA device; without it, it does not start."""

HOST_RATIO = 2.0
"""Tokens of a server's host pool, in those of its KV cache. A copy of all that the cache holds stays there, so that a
pool of the cache's size has no room for a long fetch; and SGLang fetches at most half of the pool at once."""

_PROBE_BYTES, _PROBE_PAGES = 16 << 20, 256
_PROBE_TOKENS, _PROBE_S = 128, 0.2
"""The shortest prefill that is measured; lengths are doubled until so many seconds of CPU are spent."""


@dataclass(frozen=True)
class KvPlan:
    """How a server stores and fetches keys and values."""

    folder: Path
    """Of one run, policy shape and layout: what lies there fits every cell that was given it."""
    budget: int
    """Bytes that may lie there."""
    least_tokens: int
    """Prefixes below are computed anew."""
    patience_s_per_1k: float
    """Seconds a thousand tokens after which a fetch that has not ended is given up: computing them takes no longer."""
    prefill: PrefillCost
    """What the server takes a prefill to cost until it has measured its own."""
    fetch: FetchCost
    """What a fetch costs."""

    def arguments(self) -> list[str]:
        """What SGLang is told."""
        config = {
            "backend_name": "gyre",
            "module_path": "gyre.serving.kv_backend",
            "class_name": "KvStorage",
            "interface_v1": 1,
            "prefetch_threshold": self.least_tokens,
            "prefetch_timeout_base": 0.5,
            "prefetch_timeout_per_ki_token": self.patience_s_per_1k,
            "folder": str(self.folder),
            "budget": self.budget,
            "prefill": asdict(self.prefill),
            "fetch": asdict(self.fetch),
        }
        return [
            "--enable-hierarchical-cache",
            "--page-size", str(PAGE_TOKENS),
            "--hicache-ratio", str(HOST_RATIO),
            "--hicache-write-policy", "write_through",
            "--hicache-storage-prefetch-policy", "timeout",
            "--hicache-storage-backend", "dynamic",
            "--hicache-storage-backend-extra-config", json.dumps(config),
        ]  # fmt: skip


def plan_kv(
    run_id: str, policy_path: Path, context: int | None, serving: ServingConfig, cell: CellConfig, spare: Path
) -> KvPlan | None:
    """The plan of `cell`, or None where nothing is to move; one line in the log says why.

    Measures for some tenths of a second. `spare`: a folder on disk, the run's own, for pages that memory has no room
    for. `context`: longest prompt + completion, in tokens; None: 2048.
    """
    if serving.kv_migration == "off":
        return None
    if len(cell.nodes) > 1:  # whose other servers would have to write through as well, and find the same folder
        log.info("kv: nothing moves between cells, %s is on several machines", cell.name)
        return None
    itemsize = torch.finfo(getattr(torch, serving.dtype)).bits // 8
    try:
        shape = KvShape.read(policy_path, itemsize)
    except KeyError as field:
        log.warning("kv: nothing moves between cells, %s/config.json does not say %s", policy_path, field)
        return None
    tokens = context or 2048
    budget = serving.kv_tokens * shape.bytes_per_token
    # The host pool, as much as one cell holds in the folder, and as much again for another cell's pool.
    need, free = round((HOST_RATIO + 2) * budget) + (CUDA_RESERVE if cell.devices else 0), _free_memory()
    if need > free:
        log.warning(
            "kv: nothing moves between cells, for want of memory: serving.kv_tokens = %d needs %.1f GB more, and "
            "%.1f GB are free", serving.kv_tokens, need / 1e9, free / 1e9,
        )  # fmt: skip
        return None
    ours = f"gyre-kv-{os.getuid()}"
    root = MEMORY if _room(MEMORY) >= 2 * budget and _is_ours(MEMORY / ours) else spare
    try:
        folder = root / ours / f"{run_id}-{_fingerprint(policy_path, serving, cell, spare)}"
        prefill, fetch = measure(shape, folder.parent, serving, cell, tokens)
    except OSError as error:  # the file system may have no hard links, or no room
        log.warning("kv: nothing moves between cells, %s or %s cannot be used: %s", spare, root / ours, error)
        return None
    if serving.kv_migration == "on":
        fetch = FetchCost(0.0, 0.0)
    least, why = least_tokens(prefill, fetch, tokens), decide(prefill, fetch, tokens).reason
    if least is None:
        log.info("kv: nothing moves between cells, it would not pay: %s", why)
        return None
    log.info("kv: prefixes of %d tokens and more move between cells, through %s: %s", least, folder, why)
    patience = max(0.05, prefill.saved_s(tokens) / tokens * 1024)
    return KvPlan(folder, budget, least, patience, prefill, fetch)


def measure(
    shape: KvShape, root: Path, serving: ServingConfig, cell: CellConfig, tokens: int
) -> tuple[PrefillCost, FetchCost]:
    """What this machine does: pages through a folder below `root`, and one layer's prefills, of up to `tokens` tokens.

    By CPU time, not by the clock: what else the machine does at this moment is not its speed. Raises OSError where
    the folder does not take pages.
    """
    fetch = FetchCost(FIXED_S, _token_s(shape, serving, root))
    if cell.devices:
        flops = CUDA_FLOPS * len(cell.devices)
        assumed = f"assumed, {flops / 1e12:.0f} Tflop/s"
        return PrefillCost(0.0, shape.flops_per_token / flops, shape.flops_per_pair / flops, False, assumed), fetch
    measured = _layer_prefills(shape, serving, len(cell.cpus) or 1, tokens)
    lengths = ", ".join(str(p.new) for p in measured)
    return fit(measured, True, f"a fit to one layer's, of {lengths} tokens"), fetch


def _token_s(shape: KvShape, serving: ServingConfig, root: Path) -> float:
    """Seconds of a token's keys and values from the folder into a server: read, checked, on to where it computes."""
    use = FolderUse(root / "probe")  # who is killed meanwhile leaves nothing that the next does not remove
    mine = uuid.uuid4().hex
    try:
        probe = PageFolder(root / "probe", _PROBE_BYTES * 64)
        rows, width = shape.layers * PAGE_TOKENS, shape.kv_heads * shape.head
        page = torch.zeros(2, rows, width, dtype=getattr(torch, serving.dtype))
        blocks = [memoryview(half.view(torch.uint8).numpy()).cast("B") for half in page]
        names = [f"{mine}{i}" for i in range(max(2, min(_PROBE_PAGES, _PROBE_BYTES // page.nbytes)))]
        for name in names:
            if not probe.put("0", name, blocks):
                raise OSError("a page could not be stored")
        pool, places, times = torch.zeros_like(page), torch.randperm(rows), list[float]()
        for name in names:
            began = time.thread_time()
            if not probe.get("0", name, blocks):
                raise OSError("a page could not be read back")
            pool[:, places] = page[:, places]
            times.append(time.thread_time() - began)
        return max(sum(times[1:]), 1e-9) / (len(times) - 1) / PAGE_TOKENS
    finally:
        use.close()


def _layer_prefills(shape: KvShape, serving: ServingConfig, threads: int, tokens: int) -> list[Prefill]:
    """Prefills of one layer that is like the model's, each the better of two, as seconds of all layers.

    The process's CPU time is taken to be that of `threads` threads that all compute.
    """
    before, dtype = torch.get_num_threads(), getattr(torch, serving.dtype)
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            layer, found, spent, n = _Layer(shape, dtype), list[Prefill](), 0.0, _PROBE_TOKENS
            layer(torch.randn(16, shape.hidden, dtype=dtype))  # what is made at first use is made
            while not found or (n <= tokens and spent < _PROBE_S):
                x, times = torch.randn(n, shape.hidden, dtype=dtype), list[float]()
                for _ in range(2):
                    began = time.process_time()
                    layer(x)
                    times.append((time.process_time() - began) / threads)
                spent += sum(times)
                found.append(Prefill(n, 0, max(min(times), 1e-9) * shape.layers))
                n *= 2
            return found
    finally:
        torch.set_num_threads(before)


class _Layer:
    """The work of a decoder layer: its matrices, and attention as SGLang's `torch_native` computes it."""

    def __init__(self, shape: KvShape, dtype: torch.dtype) -> None:
        self._shape = shape
        wide, kv = shape.heads * shape.head, shape.kv_heads * shape.head
        sizes = ((wide + 2 * kv, shape.hidden), (shape.hidden, wide), (2 * shape.intermediate, shape.hidden))
        self._qkv, self._out, self._up = (torch.randn(*size, dtype=dtype) * size[1] ** -0.5 for size in sizes)
        self._down = torch.randn(shape.hidden, shape.intermediate, dtype=dtype) * shape.intermediate**-0.5

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        s = self._shape
        parts = torch.split(nn.linear(x, self._qkv), [s.heads * s.head, s.kv_heads * s.head, s.kv_heads * s.head], -1)
        q, k, v = (part.view(len(x), -1, s.head).movedim(0, 1).unsqueeze(0) for part in parts)
        seen = nn.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.heads != s.kv_heads)
        x = x + nn.linear(seen.squeeze(0).movedim(0, 1).flatten(1), self._out)
        gate, up = nn.linear(x, self._up).chunk(2, dim=-1)
        return x + nn.linear(nn.silu(gate) * up, self._down)


def _free_memory() -> int:
    """Bytes that this machine, or the container (cgroup v2) that this process is in, has to give."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or one without a limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return free


def _room(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _is_ours(folder: Path) -> bool:
    """Whether nobody else can put pages there: anyone may make a folder where it lies."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:  # something else has the name, or nobody may write there
        log.warning("kv: %s cannot be used: %s", folder, error)
        return False
    return found.st_uid == os.getuid() and not stat.S_ISLNK(found.st_mode) and not found.st_mode & 0o022


def _fingerprint(policy_path: Path, serving: ServingConfig, cell: CellConfig, spare: Path) -> str:
    """Of everything but the weights that decides a page's bytes; the weights are the policy version's affair.

    Two runs of one name have different weights under one version, and different folders of data.
    """
    config = json.loads((policy_path / "config.json").read_text(encoding="utf-8"))
    data = [str(spare.absolute()), _identity(spare)]
    facts = [config, serving.dtype, len(cell.devices), PAGE_TOKENS, *data]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def _identity(folder: Path) -> str:
    """The same for all that ask while `folder` stands: one that was removed and made anew is of another run, though a
    server of the first may live on for a moment."""
    folder.mkdir(parents=True, exist_ok=True)
    mine, found = folder / f".{uuid.uuid4().hex}", folder / "id"
    mine.write_text(uuid.uuid4().hex, encoding="utf-8")
    with contextlib.suppress(FileExistsError):
        found.hardlink_to(mine)  # whole or not at all, and the first stays
    mine.unlink()
    return found.read_text(encoding="utf-8")
