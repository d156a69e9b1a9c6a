"""SGLang's storage for keys and values (HiCache's third level) in a folder that cells share, keyed by policy version.

SGLang 0.5.23 names a page by its tokens and those before it, not by the weights that computed it. So this storage
belongs to one version at a time: the one that the weights had when the prefix cache was last emptied, since all that
the server holds was computed after that. It changes in that moment alone (`emptied`), when SGLang's copying threads
have been joined and their queues dropped (`kv_hooks` says so). Between new weights and the emptying of the cache the
two versions differ, and the storage takes and gives nothing.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from gyre.serving.kv_cost import PAGE_TOKENS, FetchCost, Prefill, PrefillCost
from gyre.serving.kv_judge import KvJudge
from gyre.serving.kv_pages import PageFolder

log = logging.getLogger(__name__)


class KvStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not typed
    """`extra_config` of the server: what `KvPlan.arguments` says. SGLang makes one in each rank's scheduler."""

    def __init__(self, config: Any, kwargs: Any = None) -> None:
        told = config.extra_config
        self._pages = PageFolder(Path(told["folder"]), int(told["budget"]))
        self._judge = KvJudge(PrefillCost(**told["prefill"]), FetchCost(**told["fetch"]))
        # Ranks hold different heads and layers of the same tokens.
        self._rank = f"-t{config.tp_rank}.{config.tp_size}-p{config.pp_rank}.{config.pp_size}"
        self._version = _weight_version()
        self._counted: dict[str, int] = {}
        self._counter = _counter("gyre_kv_pages", "Pages of keys and values by what became of them", "result")
        self._decisions = _counter("gyre_kv_decisions", "Stored prefixes by what was decided", "decision")

    @property
    def version(self) -> str | None:
        """Whose pages it takes and gives; None while the weights are newer than the cache."""
        version = _weight_version()
        return version if version == self._version and version.isdigit() else None

    def emptied(self) -> None:
        """The server's cache holds nothing: what comes now is of the weights as they are."""
        self._version = _weight_version()
        if self._version.isdigit():
            # The version before stays: another cell may still serve it.
            self._pages.keep_from(int(self._version) - 1)

    def computed(self, prefill: Prefill) -> None:
        """The server has computed this prefill: what it goes by when a prefix is found."""
        self._judge.saw(prefill)

    # ---- what SGLang calls ----------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of the pages, from the first on, should be read: those that were stored, or none where computing
        them is estimated to be better. SGLang asks once for all pages of a prompt that its own cache does not hold."""
        version = self.version
        if version is None:
            return 0
        found = len(keys)
        for i, key in enumerate(keys):
            if not self._pages.has(version, key + self._rank):
                found = i
                break
        if found == 0:
            return 0
        fetch = self._judge.decide(found * PAGE_TOKENS, len(keys) * PAGE_TOKENS).fetch
        self._decisions.labels("fetch" if fetch else "compute").inc()
        return found if fetch else 0

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Read pages into the server's host memory; after the first that fails none is read."""
        version = self.version
        found = [False] * len(keys)
        if version is not None:
            for i, (key, blocks) in enumerate(zip(keys, self._blocks(host_indices), strict=True)):
                if not self._pages.get(version, key + self._rank, blocks):
                    break
                found[i] = True
        self._count()
        return found

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages from the server's host memory."""
        version = self.version
        if version is None:
            return [False] * len(keys)
        pairs = zip(keys, self._blocks(host_indices), strict=True)
        stored = [self._pages.put(version, key + self._rank, blocks) for key, blocks in pairs]
        self._count()
        return stored

    def exists(self, key: str) -> bool:
        """Whether one page was stored."""
        version = self.version
        return version is not None and self._pages.has(version, key + self._rank)

    def clear(self) -> None:
        """Remove all pages, of all cells."""
        self._pages.clear()

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Not used: the server was told that pages are read in place (`interface_v1`)."""
        raise NotImplementedError("pages are read by batch_get_v1")

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        """See `get`."""
        raise NotImplementedError("pages are read by batch_get_v1")

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """See `get`."""
        raise NotImplementedError("pages are stored by batch_set_v1")

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """See `get`."""
        raise NotImplementedError("pages are stored by batch_set_v1")

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _blocks(self, host_indices: Any) -> list[list[memoryview]]:
        """The memory of each page: its keys and its values, where the pool has them."""
        pool = self.mem_pool_host
        pages = len(host_indices) // pool.page_size
        pointers, sizes = pool.get_page_buffer_meta(host_indices)
        a_page = len(pointers) // pages if pages else 0
        views = [
            memoryview((ctypes.c_char * size).from_address(pointer)).cast("B")
            for pointer, size in zip(pointers, sizes, strict=True)
        ]
        return [views[i * a_page : (i + 1) * a_page] for i in range(pages)]

    def _count(self) -> None:
        for what, now in list(self._pages.counts.items()):
            self._counter.labels(what).inc(now - self._counted.get(what, 0))
            self._counted[what] = now


def _weight_version() -> str:
    from sglang.srt.runtime_context import get_serving

    return str(get_serving().weight_version)


def _counter(name: str, meaning: str, label: str) -> Any:
    from prometheus_client import REGISTRY, Counter

    return REGISTRY._names_to_collectors.get(name) or Counter(name, meaning, [label])
