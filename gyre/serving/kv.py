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
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from gyre.config import CellConfig, ServingConfig
from gyre.serving.kv_cost import PAGE_TOKENS, KvRates, KvShape, least_tokens, prefill_s, transfer_s
from gyre.serving.kv_pages import PageFolder

log = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")
"""Where pages lie in memory, if there is room."""

CUDA_FLOPS = 3e14
"""Multiplications and additions a second that one CUDA device is taken to reach in a prefill. An assumption (bfloat16
on a Hopper card), not measured: the agent opens no context on a device that is the server's."""

CUDA_RESERVE = 10 << 30
"""Memory that SGLang keeps free beside the pages it holds for a CUDA device; without it, it does not start."""

_PROBE_BYTES, _PROBE_PAGES = 16 << 20, 256
_PROBE_PRODUCTS = 5


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
        }
        return [
            "--enable-hierarchical-cache",
            "--page-size", str(PAGE_TOKENS),
            "--hicache-ratio", "1.0",
            "--hicache-write-policy", "write_through",
            "--hicache-storage-prefetch-policy", "timeout",
            "--hicache-storage-backend", "dynamic",
            "--hicache-storage-backend-extra-config", json.dumps(config),
        ]  # fmt: skip


def plan_kv(
    run_id: str, policy_path: Path, context: int | None, serving: ServingConfig, cell: CellConfig, spare: Path
) -> KvPlan | None:
    """The plan of `cell`, or None where nothing is to move; one line in the log says why.

    Measures for about a tenth of a second. `spare`: a folder on disk, the run's own, for pages that memory has no room
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
    # A copy of all that it holds in its host memory, as much in the folder, and as much for another cell.
    need, free = 3 * budget + (CUDA_RESERVE if cell.devices else 0), _free_memory()
    if need > free:
        log.warning(
            "kv: nothing moves between cells, for want of memory: serving.kv_tokens = %d needs %.1f GB more, and "
            "%.1f GB are free", serving.kv_tokens, need / 1e9, free / 1e9,
        )  # fmt: skip
        return None
    ours = f"gyre-kv-{os.getuid()}"
    root = MEMORY if _room(MEMORY) >= 2 * budget and _is_ours(MEMORY / ours) else spare
    folder = root / ours / f"{run_id}-{_fingerprint(policy_path, serving, cell, spare)}"
    try:
        rates = measure(shape, folder.parent, serving, cell)
    except OSError as error:
        log.warning("kv: nothing moves between cells, %s takes no pages: %s", folder.parent, error)
        return None
    least = least_tokens(shape, rates, tokens)
    estimate = (
        f"{tokens} tokens move in {transfer_s(shape, rates, tokens):.2f} s "
        f"({rates.bytes_per_s / 1e9:.1f} GB/s) and are computed in {prefill_s(shape, rates, tokens):.2f} s"
    )
    if least is None:
        log.info("kv: nothing moves between cells, it would not pay: %s", estimate)
        return None
    log.info("kv: prefixes of %d tokens and more move between cells, through %s: %s", least, folder, estimate)
    patience = max(0.05, prefill_s(shape, rates, tokens) / tokens * 1024)
    return KvPlan(folder, budget, least, patience)


def measure(shape: KvShape, root: Path, serving: ServingConfig, cell: CellConfig) -> KvRates:
    """What this machine does: pages through a folder below `root`, and a product of matrices like a layer's.

    By CPU time, not by the clock: what else the machine does at this moment is not its speed. Raises OSError where
    the folder does not take pages.
    """
    return KvRates(_bytes_per_s(shape, root), _flops_per_s(serving, cell))


def _bytes_per_s(shape: KvShape, root: Path) -> float:
    probe = PageFolder(root / f"probe-{uuid.uuid4().hex[:8]}", _PROBE_BYTES * 2)
    try:
        half = shape.bytes_per_token * PAGE_TOKENS // 2
        page = [memoryview(bytearray(os.urandom(half))) for _ in range(2)]
        names = [str(i) for i in range(max(1, min(_PROBE_PAGES, _PROBE_BYTES // (2 * half))))]
        for name in names:
            if not probe.put("0", name, page):
                raise OSError("a page could not be stored")
        into = torch.zeros(2 * half, dtype=torch.uint8)
        best = float("inf")
        for name in names:
            began = time.thread_time()
            if not probe.get("0", name, page):
                raise OSError("a page could not be read back")
            into.copy_(torch.frombuffer(page[0].obj, dtype=torch.uint8).repeat(2))  # on to where the server computes
            best = min(best, time.thread_time() - began)
        return 2 * half / max(best, 1e-9)
    finally:
        shutil.rmtree(probe.folder, ignore_errors=True)


def _flops_per_s(serving: ServingConfig, cell: CellConfig) -> float:
    if cell.devices:
        return CUDA_FLOPS * len(cell.devices)
    before, threads = torch.get_num_threads(), len(cell.cpus) or 1
    torch.set_num_threads(threads)
    try:
        a, b = (torch.randn(512, 512, dtype=getattr(torch, serving.dtype)) for _ in range(2))
        torch.mm(a, b)
        best = float("inf")
        for _ in range(_PROBE_PRODUCTS):
            began = time.process_time()
            torch.mm(a, b)
            best = min(best, time.process_time() - began)
        return 2 * 512**3 * threads / max(best, 1e-9)
    finally:
        torch.set_num_threads(before)


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
    facts = [config, serving.dtype, len(cell.devices), "page_first", PAGE_TOKENS, str(spare.absolute())]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
