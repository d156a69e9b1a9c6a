"""The ways a page could take from one process to another on this machine, each with its check, as GB/s of its reader.

`folder`: a file a page in memory (what cells use). `socket` and `mooncake`: gyre.transfer's two, all pages in one pull.
`store`: Mooncake's store, whose master and whose writer are processes of their own; it checks nothing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.table import interleave, show
from gyre.serving.kv import MEMORY
from gyre.serving.kv_pages import FolderUse, PageFolder
from gyre.serving.process import child_setup
from gyre.transfer import Ticket, open_publisher, open_puller

PAGES, PAGE_BYTES = 128, 16 * 46080
"""Of SmolLM2-135M in float32: 16 tokens a page, 2,048 tokens in all."""


READY_S = 120
"""A writer that has said nothing after so long ends the bench."""

Ready = Callable[[], Any]
"""Waits until a writer's pages can be read; what it said."""


def main(rounds: int = 7) -> None:
    with contextlib.ExitStack() as stack:
        folder = MEMORY / f"gyre-bench-kv-{os.getuid()}" / "pages"  # a bench that is killed leaves it to the next
        stack.callback(FolderUse(folder).close)
        port = stack.enter_context(_master())
        # Forked while this process has no threads: four that import torch anew take minutes on a machine that is busy.
        writers = [
            stack.enter_context(_other(target, argument))
            for target, argument in (
                (_write_folder, str(folder)), (_publish, "socket"), (_publish, "mooncake"), (_fill_store, port)
            )
        ]  # fmt: skip
        ways = {
            "folder": stack.enter_context(_folder(writers[0], str(folder))),
            "socket": stack.enter_context(_transfer(writers[1])),
            "mooncake": stack.enter_context(_transfer(writers[2])),
            "store": stack.enter_context(_store(writers[3], port)),
        }
        for way in ways.values():
            way()
        show(f"{PAGES} pages of {PAGE_BYTES:,} bytes", "GB/s", interleave(ways, rounds), "folder", more_is_better=True)


def _rate(read: Callable[[], object]) -> Callable[[], float]:
    def measured() -> float:
        began = time.perf_counter()
        read()
        return PAGES * PAGE_BYTES / (time.perf_counter() - began) / 1e9

    return measured


def _data() -> torch.Tensor:
    return torch.randint(0, 256, (PAGES, PAGE_BYTES), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@contextlib.contextmanager
def _folder(ready: Ready, name: str) -> Iterator[Callable[[], float]]:
    ready()
    folder, into = PageFolder(Path(name), 1 << 40), torch.zeros(PAGES, PAGE_BYTES, dtype=torch.uint8)
    views = [memoryview(page.numpy()).cast("B") for page in into]

    def read() -> None:
        assert all(folder.get("0", str(i), [view]) for i, view in enumerate(views))

    yield _rate(read)
    assert torch.equal(into, _data())


def _write_folder(pipe: Connection, name: str) -> None:
    folder = PageFolder(Path(name), 1 << 40)
    for i, page in enumerate(_data()):
        assert folder.put("0", str(i), [memoryview(page.numpy()).cast("B")])
    pipe.send(None)
    pipe.recv()


@contextlib.contextmanager
def _transfer(ready: Ready) -> Iterator[Callable[[], float]]:
    puller = open_puller(Ticket.from_json(ready()))
    yield _rate(puller.pull)
    assert torch.equal(puller.pull()[1]["pages"], _data())
    puller.close()


def _publish(pipe: Connection, backend: Any) -> None:
    publisher = open_publisher({"pages": _data()}, backend)
    pipe.send(publisher.publish(0).to_json())
    pipe.recv()
    publisher.close()


@contextlib.contextmanager
def _store(ready: Ready, port: int) -> Iterator[Callable[[], float]]:
    ready()
    store = _client(port, 0)
    into = torch.zeros(PAGES, PAGE_BYTES, dtype=torch.uint8)
    assert store.register_buffer(into.data_ptr(), into.nbytes) == 0
    names, places = [str(i) for i in range(PAGES)], [page.data_ptr() for page in into]

    def read() -> None:
        got = store.batch_get_into(names, places, [PAGE_BYTES] * PAGES)
        assert all(n == PAGE_BYTES for n in got), got

    yield _rate(read)
    assert torch.equal(into, _data())
    store.close()


@contextlib.contextmanager
def _master() -> Iterator[int]:
    """Mooncake's, for its store; the port that it listens at."""
    port, metrics = _free_port(), _free_port()
    binary = shutil.which("mooncake_master", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if binary is None:
        raise SystemExit("mooncake_master is not installed beside this Python")
    argv = [binary, "-rpc_address=127.0.0.1", f"-rpc_port={port}", "-metrics_host=127.0.0.1"]
    master = subprocess.Popen(
        [*argv, f"-metrics_port={metrics}", "-default_kv_lease_ttl=600000"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=child_setup(),
    )  # fmt: skip
    try:
        yield port
    finally:
        master.kill()
        master.wait()


def _fill_store(pipe: Connection, port: int) -> None:
    _wait_for(port)
    store, data = _client(port, 256 << 20), _data()
    assert store.register_buffer(data.data_ptr(), data.nbytes) == 0
    codes = store.batch_put_from([str(i) for i in range(PAGES)], [p.data_ptr() for p in data], [PAGE_BYTES] * PAGES)
    assert not any(codes), codes
    pipe.send(None)
    pipe.recv()
    store.close()


def _client(port: int, segment: int) -> Any:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 128 << 20, "tcp", "", f"127.0.0.1:{port}")
    if code != 0:
        raise SystemExit(f"Mooncake's store did not start: {code}")
    return store


@contextlib.contextmanager
def _other(target: Callable[..., None], argument: Any) -> Iterator[Ready]:
    """Run `target` in a process of its own until the block ends."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(child_setup(), target, theirs, argument), daemon=True)
    process.start()
    theirs.close()

    def ready() -> Any:
        if not ours.poll(READY_S):
            raise SystemExit(f"{target.__name__}: not ready after {READY_S} s")
        return ours.recv()

    try:
        yield ready
        ours.send(None)
        process.join(10)
    finally:
        process.kill()


def _child(setup: Callable[[], None], target: Callable[..., None], pipe: Connection, argument: Any) -> None:
    setup()
    target(pipe, argument)


def _free_port() -> int:
    from gyre.ports import free_port

    return free_port("127.0.0.1")


def _wait_for(port: int) -> None:
    for _ in range(10 * READY_S):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise SystemExit("mooncake_master does not listen")
