"""Pages in a shared folder: whole or absent, of their version alone, never more than the budget."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.config import CellConfig, ServingConfig
from gyre.serving.kv import KvPlan, measure, plan_kv
from gyre.serving.kv_cost import PAGE_TOKENS, FetchCost, KvShape, PrefillCost
from gyre.serving.kv_hooks import page_hashes
from gyre.serving.kv_pages import FolderUse, PageFolder
from tests.serving.tiny_policy import write_policy

KEY = "ab" * 32
BIG = {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9}
"""Of a config.json: a model whose prefixes are worth moving."""


def blocks(keys: bytes, values: bytes) -> list[memoryview]:
    return [memoryview(bytearray(keys)), memoryview(bytearray(values))]


@pytest.fixture
def folder(tmp_path: Path) -> PageFolder:
    return PageFolder(tmp_path / "kv", budget=1 << 20)


def test_a_page_comes_back_in_another_process_place(folder: PageFolder, tmp_path: Path) -> None:
    assert not folder.has("3", KEY)
    assert folder.put("3", KEY, blocks(b"keys", b"and values"))
    other, into = PageFolder(tmp_path / "kv", 1 << 20), blocks(b"....", b"..........")
    assert other.has("3", KEY) and other.get("3", KEY, into)
    assert b"".join(into) == b"keysand values"
    assert folder.counts["stored"] == 1 and other.counts["found"] == 1


def test_a_page_belongs_to_its_version(folder: PageFolder) -> None:
    assert folder.put("3", KEY, blocks(b"old", b"old"))
    assert not folder.has("4", KEY) and not folder.get("4", KEY, blocks(b"...", b"..."))
    assert folder.counts["missing"] == 1
    assert folder.put("4", KEY, blocks(b"new", b"new"))
    folder.keep_from(4)
    assert not folder.has("3", KEY) and folder.has("4", KEY)


@pytest.mark.parametrize("place", [("4", KEY), ("3", "cd" * 32)])
def test_a_whole_page_in_anothers_place_is_refused(folder: PageFolder, place: tuple[str, str]) -> None:
    """Of another version, or of other tokens: by a mistake of a hand or of a file system."""
    folder.put("3", KEY, blocks(b"old", b"old"))
    folder.put(*place, blocks(b"new", b"new"))
    (folder.folder / "v3" / KEY).replace(folder.folder / f"v{place[0]}" / place[1])
    assert not folder.get(*place, blocks(b"...", b"..."))
    assert folder.counts["corrupt"] == 1 and not folder.has(*place)


def test_a_writer_that_died_half_way_left_no_page(folder: PageFolder) -> None:
    """And what it left goes with the oldest pages, or with its version."""
    folder.put("3", KEY, blocks(b"k", b"v"))
    (folder.folder / "v3" / KEY).rename(folder.folder / "v3" / ".0123-0")  # killed before the page had its name
    assert not folder.has("3", KEY) and not folder.get("3", KEY, blocks(b".", b"."))
    again = PageFolder(folder.folder, 1 << 20)
    assert again.put("3", KEY, blocks(b"k", b"v")) and again.get("3", KEY, blocks(b".", b"."))
    again.keep_from(4)
    assert list(folder.folder.iterdir()) == []


def test_two_writers_in_one_process_have_names_of_their_own(folder: PageFolder, tmp_path: Path) -> None:
    """As two in containers that share a folder, where process ids are the same."""
    other = PageFolder(tmp_path / "kv", 1 << 20)
    for i in range(200):
        pages = [(f, str(j), blocks(str(j).encode() * 5000, b"")) for j, f in ((2 * i, folder), (2 * i + 1, other))]
        with ThreadPoolExecutor(2) as pool:
            assert all(pool.map(lambda p: p[0].put("1", p[1], p[2]), pages))
    assert folder.counts["failed"] == other.counts["failed"] == 0


@pytest.mark.parametrize("damage", ["flipped", "cut", "emptied", "other size"])
def test_a_damaged_page_is_refused_and_removed(
    folder: PageFolder, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder.put("3", KEY, blocks(b"k" * 500, b"v" * 500))
    path = folder.folder / "v3" / KEY
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-1] ^= 1
    path.write_bytes({"cut": data[:-7], "emptied": b""}.get(damage, bytes(data)))
    into = blocks(b"." * 500, b"." * (400 if damage == "other size" else 500))
    with caplog.at_level(logging.WARNING):
        assert not folder.get("3", KEY, into)
    assert "damaged" in caplog.text and folder.counts["corrupt"] == 1
    assert not folder.has("3", KEY)


def test_a_folder_that_is_gone_is_a_miss_and_comes_again(folder: PageFolder) -> None:
    folder.put("3", KEY, blocks(b"k", b"v"))
    for path in [*folder.folder.glob("v3/*"), folder.folder / "v3", folder.folder]:
        path.rmdir() if path.is_dir() else path.unlink()
    assert not folder.get("3", KEY, blocks(b".", b"."))
    assert folder.put("3", KEY, blocks(b"k", b"v")) and folder.get("3", KEY, blocks(b".", b"."))


def test_a_disk_that_takes_nothing_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = PageFolder(tmp_path / "kv", 1 << 20)
    (tmp_path / "kv" / "v3").write_text("a file where a folder should be")
    assert not folder.put("3", KEY, blocks(b"k", b"v"))
    assert folder.counts["failed"] == 1 and "not stored" in caplog.text


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    page = 1000
    folder = PageFolder(tmp_path / "kv", budget=100 * (page + 20))
    for i in range(64):
        folder.put("1", str(i), blocks(bytes(page), b""))
        os.utime(tmp_path / "kv" / "v1" / str(i), (i, i))
    assert folder.get("1", "0", blocks(bytes(page), b""))  # used now: it stays
    for i in range(64, 128):
        folder.put("1", str(i), blocks(bytes(page), b""))
    left = {int(p.name) for p in (tmp_path / "kv" / "v1").iterdir()}
    assert 80 <= len(left) <= 100
    assert 0 in left and 1 not in left and set(range(64, 128)) <= left
    assert folder.counts["dropped"] == 128 - len(left)


def test_writers_of_one_page_do_not_meet(folder: PageFolder) -> None:
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda i: folder.put("1", str(i % 4), blocks(b"k" * 5000, b"v" * 5000)), range(64)))
    assert all(done)
    assert {p.name for p in (folder.folder / "v1").iterdir()} == {"0", "1", "2", "3"}
    assert all(folder.get("1", str(i), blocks(b"." * 5000, b"." * 5000)) for i in range(4))


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_any_bytes_come_back(tmp_path_factory: pytest.TempPathFactory, keys: bytes, values: bytes) -> None:
    folder = PageFolder(tmp_path_factory.mktemp("kv"), 1 << 20)
    folder.put("0", KEY, blocks(keys, values))
    into = blocks(bytes(len(keys)), bytes(len(values)))
    assert folder.get("0", KEY, into) and b"".join(into) == keys + values


def test_who_leaves_last_removes_the_folder(tmp_path: Path) -> None:
    shared = tmp_path / "kv" / "run"
    first, second = FolderUse(shared), FolderUse(shared)
    PageFolder(shared, 1 << 20).put("0", KEY, blocks(b"k", b"v"))
    first.close()
    assert (shared / "v0" / KEY).exists()
    second.close()
    second.close()
    assert list(shared.parent.iterdir()) == []


def test_who_comes_while_others_leave_keeps_what_it_stores(tmp_path: Path) -> None:
    """Locks are of open files, so threads meet as processes do."""
    root = tmp_path / "kv"

    def come_and_go(i: int) -> bool:
        use = FolderUse(root / f"run{i % 2}")
        folder = PageFolder(root / f"run{i % 2}", 1 << 20)
        stored = folder.put("0", str(i), blocks(b"k", b"v"))
        time.sleep(random.choice((0, 0, 0.0005)))
        kept = folder.has("0", str(i))
        use.close()
        return stored and kept

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(come_and_go, range(600)))
    assert list(root.iterdir()) == []


def test_who_comes_first_finds_nothing_of_the_killed(tmp_path: Path) -> None:
    shared = tmp_path / "kv" / "run"
    PageFolder(shared, 1 << 20).put("0", KEY, blocks(b"k", b"v"))  # by one that was killed
    use = FolderUse(shared)
    assert not shared.exists()
    use.close()


# ---- the plan ------------------------------------------------------------------------------------------------------


def test_a_folder_in_memory_that_others_may_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BIG))
    monkeypatch.setattr("gyre.serving.kv.MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    serving, cell = ServingConfig(kv_tokens=1024), CellConfig(name="c")
    plan = plan_kv("r", tmp_path, 8192, serving, cell, tmp_path / "spare")
    assert plan is not None and tmp_path / "shm" in plan.folder.parents
    (tmp_path / "shm" / f"gyre-kv-{os.getuid()}").chmod(0o777)
    plan = plan_kv("r", tmp_path, 8192, serving, cell, tmp_path / "spare")
    assert plan is not None and tmp_path / "spare" in plan.folder.parents


def test_off_means_off(tmp_path: Path) -> None:
    serving = ServingConfig(kv_migration="off")
    assert plan_kv("r", tmp_path / "nothing is read", 1024, serving, CellConfig(name="c"), tmp_path) is None


def test_a_small_policy_has_no_plan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = write_policy(tmp_path / "policy", 0)
    with caplog.at_level(logging.INFO):
        assert plan_kv("r", policy, 1024, ServingConfig(), CellConfig(name="c"), tmp_path) is None
    assert "would not pay" in caplog.text


def test_a_machine_without_the_memory_has_no_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = write_policy(tmp_path / "policy", 0)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    assert plan_kv("r", policy, 1024, ServingConfig(), CellConfig(name="c"), tmp_path) is None
    assert "want of memory" in caplog.text


def test_a_config_of_another_kind_has_no_plan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "another"}')
    assert plan_kv("r", tmp_path, 1024, ServingConfig(), CellConfig(name="c"), tmp_path) is None
    assert "does not say" in caplog.text


def test_costs_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    shape, root = KvShape.read(write_policy(tmp_path / "policy", 0), 4), tmp_path / "pages"
    (root / "probe" / "v0").mkdir(parents=True)
    (root / "probe" / "v0" / "page").write_text("of one that was killed while it measured")
    prefill, fetch = measure(shape, root, ServingConfig(), CellConfig(name="c"), 1024)
    assert prefill.whole and "128, 256" in prefill.source
    assert 0 < prefill.seconds(128) < prefill.seconds(1024) < 60
    assert 0 < fetch.per_token_s < 1e-3
    assert list(root.iterdir()) == []


def test_what_a_device_takes_is_assumed(tmp_path: Path) -> None:
    shape = KvShape.of(BIG, 2)
    prefill, _ = measure(shape, tmp_path, ServingConfig(), CellConfig(name="c", devices=[0, 1]), 1024)
    assert not prefill.whole and prefill.source == "assumed, 600 Tflop/s"
    assert prefill.seconds(1024) == pytest.approx(1024 * (shape.flops_per_token + 512 * shape.flops_per_pair) / 6e14)


def test_a_folder_of_data_that_takes_nothing_has_no_plan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BIG))
    (tmp_path / "data").write_text("a file where a folder should be")
    with caplog.at_level(logging.WARNING):
        plan = plan_kv("r", tmp_path, 8192, ServingConfig(kv_tokens=1024), CellConfig(name="c"), tmp_path / "data")
    assert plan is None and f"{tmp_path / 'data'} or" in caplog.text


def test_asked_for_it_moves_what_would_not_pay(tmp_path: Path) -> None:
    policy, cell = write_policy(tmp_path / "policy", 0), CellConfig(name="c")
    plan = plan_kv("r", policy, 1024, ServingConfig(kv_migration="on", kv_tokens=1024), cell, tmp_path)
    assert plan is not None and plan.least_tokens == PAGE_TOKENS


def test_the_servers_arguments() -> None:
    prefill = PrefillCost(0.0, 1e-3, 1e-6, True, "a guess")
    arguments = KvPlan(Path("/dev/shm/x"), 1 << 30, 512, 2.5, prefill, FetchCost(0.05, 1e-5)).arguments()
    told = json.loads(arguments[-1])
    assert (PrefillCost(**told["prefill"]), FetchCost(**told["fetch"])) == (prefill, FetchCost(0.05, 1e-5))
    assert arguments[arguments.index("--hicache-storage-backend") + 1] == "dynamic"
    assert '"prefetch_threshold": 512' in arguments[-1] and '"folder": "/dev/shm/x"' in arguments[-1]


# ---- names of pages ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.sampled_from([None, b"\x07" * 32]))
def test_a_pages_name_depends_on_all_before_it(ids: list[int], prior: bytes | None) -> None:
    names = page_hashes(ids, prior, 16)
    assert len(names) == -(-len(ids) // 16)
    assert isinstance(names, list) and names == [
        page_hashes(ids[i : i + 16], bytes.fromhex(names[n - 1]) if n else prior)
        for n, i in enumerate(range(0, len(ids), 16))
    ]
    if ids:
        changed = page_hashes([ids[0] ^ 1, *ids[1:]], prior, 16)
        assert all(a != b for a, b in zip(names, changed, strict=True))


def test_an_id_that_is_none() -> None:
    with pytest.raises(ValueError, match="uint32"):
        page_hashes([1, -1], None, 16)


def test_a_folder_whose_processes_were_killed_is_removed_by_the_next_run(tmp_path: Path) -> None:
    left = tmp_path / "killed-0123"
    left.mkdir()
    (tmp_path / "killed-0123.lock").touch()
    held = FolderUse(tmp_path / "other-0123")
    (tmp_path / "other-0123").mkdir()
    third = FolderUse(tmp_path / "third-0123")
    assert not left.exists() and (tmp_path / "other-0123").exists()
    held.close()
    third.close()
