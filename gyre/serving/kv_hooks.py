"""Hooks into SGLang 0.5.23 for `kv_backend`: when a server's cache is emptied, and that it can be while pages move."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from typing import Any

import numpy as np

from gyre.serving.kv_cost import Prefill

log = logging.getLogger(__name__)

VARIABLE = "GYRE_SGLANG_KV"
"""Set to 1: the server stores keys and values through `kv_backend`."""

SETTLE_S, TURN_S = 10.0, 0.001
"""How long a flush waits for copies on their way before it is left to SGLang, which then refuses it."""


def _emptied(result: Any, cache: Any, *args: Any, **kwargs: Any) -> Any:
    if (controller := getattr(cache, "cache_controller", None)) is not None:
        controller.storage_backend.emptied()
    return result


def _settle(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Let copies of keys and values that are on their way arrive, and drop the fetches of requests that wait.

    SGLang refuses to empty a cache under them, and with it the new weights; a paused server never looks at them.
    """
    cache = scheduler.tree_cache
    for _ in range(round(SETTLE_S / TURN_S)):  # turns, not a clock: tensor-parallel ranks take each of them together
        for request in list(cache.ongoing_prefetch):
            cache.release_aborted_request(request)
        cache.check_hicache_events()
        if not (cache.ongoing_write_through or cache.ongoing_load_back or cache.ongoing_backup):
            return
        time.sleep(TURN_S)
    log.warning("kv: copies of keys and values are still on their way after %.0f s", SETTLE_S)


def _measure(run_batch: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """How long a prefill of one request takes, as the storage's judge wants it. On CPU alone: there a batch is computed
    when this returns, and this thread's CPU time is that of each thread that computes."""
    began = time.thread_time()
    result = run_batch(scheduler, batch, *args, **kwargs)
    if batch.forward_mode.is_extend() and len(batch.reqs) == 1 and batch.extend_num_tokens:
        storage = getattr(getattr(scheduler.tree_cache, "cache_controller", None), "storage_backend", None)
        if storage is not None:
            cached = int(batch.prefix_lens[0])
            storage.computed(Prefill(int(batch.extend_num_tokens), cached, time.thread_time() - began))
    return result


def _settle_before_release(updater: Any, *args: Any, **kwargs: Any) -> None:
    _settle(updater.scheduler)


def page_hashes(tokens: Any, prior: bytes | None, page_size: int | None = None) -> str | list[str]:
    """SGLang's name of each page of `tokens`: SHA-256 of the page before and of its ids as uint32, in hex.

    It replaces SGLang's own (`get_native_hash`), which is C++ that the first request would compile, for half a minute
    and only where there is a compiler. Raises ValueError: bigrams (speculative decoding) are not known here.
    """
    if getattr(tokens, "is_bigram", False):
        raise ValueError("pages of bigrams have no name here; kv_migration needs decoding without speculation")
    raw = getattr(tokens, "raw_token_ids", None)
    ids = np.asarray(raw() if raw is not None else getattr(tokens, "token_ids", tokens))[: len(tokens)]
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 1 << 32:
        raise ValueError("a token id is not a uint32")
    data, found = ids.astype("<u4").tobytes(), []
    size = 4 * page_size if page_size else max(1, len(data))
    for at in range(0, len(data), size):
        prior = hashlib.sha256((prior or b"") + data[at : at + size]).digest()
        found.append(prior.hex())
    if page_size is not None:
        return found
    return found[0] if found else hashlib.sha256(prior or b"").hexdigest()


def register() -> None:
    """Register them where the server was told to move keys and values."""
    if os.environ.get(VARIABLE) != "1":
        return
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    managers = "sglang.srt.managers"
    updater = f"{managers}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    cache = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
    HookRegistry.register("sglang.srt.mem_cache.utils.get_native_hash", page_hashes, HookType.REPLACE)
    HookRegistry.register(f"{cache}.reset", _emptied, HookType.AFTER)
    HookRegistry.register(f"{managers}.scheduler.Scheduler.flush_cache", _settle, HookType.BEFORE)
    if not torch.cuda.is_available():
        HookRegistry.register(f"{managers}.scheduler.Scheduler.run_batch", _measure, HookType.AROUND)
    HookRegistry.register(f"{updater}.release_memory_occupation", _settle_before_release, HookType.BEFORE)
