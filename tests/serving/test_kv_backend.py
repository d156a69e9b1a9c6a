"""The storage belongs to one policy version at a time, whatever happens to the weights between two calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gyre.serving.cpu_platform import define_torchvision_ops
from gyre.serving.kv_cost import PAGE_TOKENS, FetchCost, PrefillCost

KEYS = ["a" * 64, "b" * 64]
HALF = 32
"""Bytes of a page's keys, and of its values."""


@dataclass
class Server:
    """The weights' version, and host memory of two pages."""

    version: str = "1"
    memory: ctypes.Array[ctypes.c_char] = field(default_factory=lambda: ctypes.create_string_buffer(4 * HALF))
    looked: Callable[[], None] = lambda: None
    page_size = PAGE_TOKENS

    def get_page_buffer_meta(self, indices: list[int]) -> tuple[list[int], list[int]]:
        self.looked()
        places = [ctypes.addressof(self.memory) + i * HALF for i in range(2 * len(indices) // PAGE_TOKENS)]
        return places, [HALF] * len(places)

    def fill(self, what: bytes) -> None:
        ctypes.memmove(self.memory, what * 4 * HALF, 4 * HALF)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    define_torchvision_ops()
    server = Server()
    monkeypatch.setattr("gyre.serving.kv_backend._weight_version", lambda: server.version)
    return server


def storage_of(server: Server, folder: Path) -> Any:
    from gyre.serving.kv_backend import KvStorage

    told = {
        "folder": str(folder),
        "budget": 1 << 20,
        "prefill": asdict(PrefillCost(0.0, 1.0, 0.0, True, "a guess")),
        "fetch": asdict(FetchCost(0.0, 0.0)),
    }
    storage = KvStorage(SimpleNamespace(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, extra_config=told))
    storage.mem_pool_host = server
    return storage


def pages(folder: Path) -> set[str]:
    return {f"{p.parent.name}/{p.name[0]}" for p in folder.glob("v*/*")}


INDICES = list(range(2 * PAGE_TOKENS))


def test_another_server_of_the_version_finds_what_was_stored(server: Server, tmp_path: Path) -> None:
    server.fill(b"x")
    assert storage_of(server, tmp_path).batch_set_v1(KEYS, INDICES) == [True, True]
    other = storage_of(server, tmp_path)
    assert other.batch_exists([*KEYS, "c" * 64]) == 2
    server.fill(b".")
    assert other.batch_get_v1(KEYS, INDICES) == [True, True]
    assert server.memory.raw == b"x" * 4 * HALF


def test_between_new_weights_and_the_emptying_nothing_is_taken_or_given(server: Server, tmp_path: Path) -> None:
    """Though pages of both versions lie there: what the cache holds is of the old one, what is computed of the new."""
    storage = storage_of(server, tmp_path)
    storage.batch_set_v1(KEYS, INDICES)
    server.version = "2"
    assert storage_of(server, tmp_path).batch_set_v1(KEYS, INDICES) == [True, True]
    before = pages(tmp_path)
    assert storage.version is None
    assert storage.batch_exists(KEYS) == 0 and not storage.exists(KEYS[0])
    assert storage.batch_get_v1(KEYS, INDICES) == [False, False]
    assert storage.batch_set_v1(["d" * 64, "e" * 64], INDICES) == [False, False]
    assert pages(tmp_path) == before == {"v1/a", "v1/b", "v2/a", "v2/b"}
    storage.emptied()
    assert storage.version == "2" and storage.batch_exists(KEYS) == 2


def test_a_copy_that_began_before_new_weights_goes_where_it_belongs(server: Server, tmp_path: Path) -> None:
    """What lies in the host's memory stays as it was until SGLang's threads have been joined."""
    storage = storage_of(server, tmp_path)

    def publish() -> None:
        server.version = "2"

    server.looked = publish
    assert storage.batch_set_v1(KEYS, INDICES) == [True, True]
    assert pages(tmp_path) == {"v1/a", "v1/b"}


def test_an_emptied_server_keeps_the_version_before_for_others_and_no_older(server: Server, tmp_path: Path) -> None:
    storage = storage_of(server, tmp_path)
    for version in ("1", "2", "3"):
        server.version = version
        storage.emptied()
        storage.batch_set_v1(KEYS, INDICES)
    assert pages(tmp_path) == {"v2/a", "v2/b", "v3/a", "v3/b"}


def test_a_version_that_is_no_number_stores_nothing(server: Server, tmp_path: Path) -> None:
    server.version = "default"
    storage = storage_of(server, tmp_path)
    storage.emptied()
    assert storage.batch_set_v1(KEYS, INDICES) == [False, False] and pages(tmp_path) == set()
