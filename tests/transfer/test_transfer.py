"""Both backends keep the same promises: never torn, never corrupt, never from another life, never in place."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gyre.transfer import (
    CorruptTransfer,
    LappedTransfer,
    PublisherGone,
    StaleTicket,
    Ticket,
    TransferError,
    base,
    mooncake,
    open_publisher,
    open_puller,
    sockets,
)

BACKENDS = ["mooncake", "socket"]


@dataclass
class Publisher:
    process: subprocess.Popen[str]
    ticket: Ticket

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def publish(self, version: int) -> Ticket:
        self.tell(f"publish {version}")
        return self.read_ticket()

    def read_ticket(self) -> Ticket:
        assert self.process.stdout is not None
        self.ticket = Ticket.from_json(json.loads(self.process.stdout.readline()))
        return self.ticket

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def publisher_process(
    backend: str, mib: float, host: str = "127.0.0.1", within: Sequence[str] = ()
) -> Iterator[Publisher]:
    """`within`: a command that runs commands, such as in another network."""
    argv = [*within, sys.executable, "-m", "tests.transfer.publisher", backend, str(mib), host]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        publisher = Publisher(process, None)  # type: ignore[arg-type]
        publisher.read_ticket()
        yield publisher
    finally:
        process.kill()
        process.wait()


def assert_untorn(version: int, tensors: dict[str, torch.Tensor]) -> None:
    assert list(tensors) == ["w0", "w1", "w2"]
    for i, tensor in enumerate(tensors.values()):
        assert tensor.min() == tensor.max() == version + i


LIMIT_S = 60
"""Far above the ten seconds of silence that end a pull, far below the two minutes of a kernel that connects."""


def refused(puller: Any) -> None:
    """A pull says within seconds that the publisher is gone."""
    started = time.monotonic()
    with pytest.raises(PublisherGone, match=r"publisher at .*:\d+ is gone; wait for a new ticket"):
        puller.pull()
    assert time.monotonic() - started < LIMIT_S


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes_shapes_and_bits_survive(backend: Any) -> None:
    g = torch.Generator().manual_seed(1)
    params = {
        "a.weight": torch.randn(7, 5, generator=g),
        "half": torch.randn(3, generator=g).to(torch.bfloat16),
        "ids": torch.randint(-5, 5, (2, 2, 3), generator=g),
        "scalar": torch.tensor(float("nan")),
        "none": torch.zeros(0, 4),
        "grad": torch.randn(1000, generator=g),
    }
    publisher = open_publisher(params, backend)
    ticket = Ticket.from_json(json.loads(json.dumps(publisher.publish(3).to_json())))
    assert (ticket.backend, ticket.version) == (backend, 3)
    puller = open_puller(ticket)
    version, got = puller.pull()
    assert version == 3 and list(got) == list(params)
    for name, tensor in params.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape
        assert torch.equal(bits(got[name]), bits(tensor))
    params["grad"].add_(1)
    assert not torch.equal(got["grad"], params["grad"])  # a publication is a copy: the tensor may change at once
    assert torch.equal(puller.pull()[1]["grad"] + 1, params["grad"])
    publisher.publish(4)
    version, again = puller.pull()
    assert version == 4 and torch.equal(again["grad"], params["grad"])
    puller.close()
    publisher.close()
    with pytest.raises((PublisherGone, StaleTicket)):
        open_puller(ticket).pull()


@pytest.mark.parametrize("backend", BACKENDS)
def test_never_torn_while_the_publisher_overwrites(backend: str) -> None:
    with publisher_process(backend, 24) as publisher:
        puller = open_puller(publisher.ticket)
        publisher.tell("spin 0.2")
        versions, laps = [], 0
        deadline = time.monotonic() + 300
        # Both counts, since how many pulls fall between two publications is the machine's business.
        while len(versions) < 25 or len(set(versions)) <= 5:
            assert time.monotonic() < deadline, f"starved: {len(versions)} pulls, {laps} lapped"
            try:
                version, tensors = puller.pull()
            except LappedTransfer:
                laps += 1
                continue
            assert_untorn(version, tensors)
            versions.append(version)
        assert versions == sorted(versions)


def interrupt(backend: str, monkeypatch: pytest.MonkeyPatch, action: Any) -> None:
    """Have the next pull read half of the slot, do `action`, and read on."""
    owner: Any = mooncake.MooncakePuller if backend == "mooncake" else sockets
    name = "_read_slot" if backend == "mooncake" else "_read_into"
    original = getattr(owner, name)
    pending = [action]

    def halves(*args: Any) -> None:
        if not pending:
            return original(*args)
        act = pending.pop()
        *where, target, found = args
        half = target.nbytes // 2 // base.ALIGNMENT * base.ALIGNMENT
        original(*where, target[:half], found)
        act()
        if backend == "mooncake":
            where[-1] += half  # the address
        original(*where, target[half:], found)
        return None

    monkeypatch.setattr(owner, name, halves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pull_that_was_overtaken_is_tried_again(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with publisher_process(backend, 24) as publisher:
        puller = open_puller(publisher.ticket)
        interrupt(backend, monkeypatch, lambda: (publisher.publish(1), publisher.publish(2)))
        with monkeypatch.context() as once:
            module = mooncake if backend == "mooncake" else sockets
            once.setattr(module, "retry_lapped", lambda attempt: attempt())
            with pytest.raises(LappedTransfer, match=r"slot( \d)? ?rewritten while read, 2 -> 4|slot rewritten"):
                puller.pull()
        assert_untorn(*puller.pull())
        interrupt(backend, monkeypatch, lambda: (publisher.publish(3), publisher.publish(4)))
        version, tensors = puller.pull()
        assert version == 4
        assert_untorn(version, tensors)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_publication_meanwhile_does_not_disturb(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with publisher_process(backend, 24) as publisher:
        puller = open_puller(publisher.ticket)
        interrupt(backend, monkeypatch, lambda: publisher.publish(9))
        version, tensors = puller.pull()
        assert version == 0  # the other slot was written
        assert_untorn(version, tensors)


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_bytes_are_refused_and_the_old_ones_stay(backend: Any) -> None:
    params = {"grad": torch.randn(5000)}
    publisher = open_publisher(params, backend)
    puller = open_puller(publisher.publish(1))
    _, held = puller.pull()
    before = held["grad"].clone()
    params["grad"].mul_(2)
    publisher.publish(2)
    slots: base.Slots = publisher._slots  # type: ignore[attr-defined]
    slots.buffers[slots.current][random.randrange(slots.layout.nbytes)] ^= 0x10
    with pytest.raises(CorruptTransfer, match="checksum of version 2 does not match"):
        puller.pull()
    assert torch.equal(held["grad"], before)
    publisher.publish(3)
    assert puller.pull()[0] == 3
    publisher.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_publisher_killed_mid_pull(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with publisher_process(backend, 48) as publisher:
        puller = open_puller(publisher.ticket)
        version, held = puller.pull()
        publisher.publish(1)
        interrupt(backend, monkeypatch, publisher.kill)
        refused(puller)
        assert_untorn(version, held)
        refused(puller)
        refused(open_puller(publisher.ticket))
    with publisher_process(backend, 1) as successor:
        assert_untorn(*open_puller(successor.ticket).pull())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_ticket_of_an_earlier_life_is_refused(backend: Any) -> None:
    publisher = open_publisher({"grad": torch.ones(10)}, backend)
    ticket = publisher.publish(1)
    with pytest.raises(StaleTicket, match="has been restarted; get its new ticket"):
        open_puller(replace(ticket, incarnation=ticket.incarnation ^ 1)).pull()
    assert open_puller(ticket).pull()[0] == 1
    publisher.close()


def test_a_socket_gives_nothing_without_the_token() -> None:
    publisher = open_publisher({"grad": torch.ones(10)}, "socket")
    ticket = publisher.publish(1)
    for token in ("", "x" * 32, None, "s\u00e9cret", "\ud800"):
        with pytest.raises(TransferError, match="refused the ticket: token"):
            open_puller(replace(ticket, detail={"token": token})).pull()
    publisher.close()


def test_bad_tickets_and_empty_publications() -> None:
    good = Ticket("socket", "127.0.0.1:1", 5, 0, {})
    with pytest.raises(TransferError, match=r"ticket\.backend: 'pigeon' is unknown"):
        Ticket.from_json({**good.to_json(), "backend": "pigeon"})
    with pytest.raises(TransferError, match="wings"):
        Ticket.from_json({**good.to_json(), "wings": 2})
    with pytest.raises(TransferError, match="nothing to publish"):
        open_publisher({}, "socket")


CHOOSE = """
import logging, sys, torch
logging.basicConfig(level="INFO", format="%(message)s")
from gyre.transfer import mooncake, open_publisher, open_puller
if len(sys.argv) > 1:
    def rdma_devices():  # for the choice alone: there is no device that the engine could open
        return [] if sys._getframe(1).f_code.co_name == "engine" else sys.argv[1:]
    mooncake.rdma_devices = rdma_devices
first, second = open_publisher({"grad": torch.ones(3)}), open_publisher({"grad": torch.ones(3)})
ticket = first.publish(7)
print(ticket.backend, open_puller(ticket).pull()[0])
"""


@pytest.mark.parametrize(
    ("devices", "engine", "backend", "line"),
    [
        ([], None, "socket", "transfer: plain sockets (no RDMA device)"),
        (["mlx5_0", "mlx5_1"], None, "mooncake", "transfer: Mooncake Transfer Engine, RDMA by mlx5_0, mlx5_1"),
        (
            ["mlx5_0"],
            'raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")',
            "socket",
            "transfer: plain sockets (Mooncake cannot load: libibverbs.so.1: cannot open shared object file: No such "
            "file or directory; install the package libibverbs1)",
        ),
        (
            ["mlx5_0"],
            'raise ModuleNotFoundError("No module named mooncake")',
            "socket",
            "transfer: plain sockets (Mooncake cannot load: No module named mooncake)",
        ),
    ],
)
def test_auto_says_once_what_it_chose(
    tmp_path: Path, devices: list[str], engine: str | None, backend: str, line: str
) -> None:
    env = dict(os.environ)
    if engine is not None:
        (tmp_path / "mooncake").mkdir()
        (tmp_path / "mooncake" / "__init__.py").touch()
        (tmp_path / "mooncake" / "engine.py").write_text(engine, encoding="utf-8")
        env["PYTHONPATH"] = str(tmp_path)
    argv = [sys.executable, "-c", CHOOSE, *devices]
    ran = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
    assert ran.stdout.split() == [backend, "7"], ran.stderr
    assert [x for x in ran.stderr.splitlines() if x.startswith("transfer:")] == [line]


def test_rdma_devices_are_those_that_the_kernel_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_RDMA", tmp_path / "none")
    assert mooncake.rdma_devices() == []
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(mooncake, "_RDMA", tmp_path)
    assert mooncake.rdma_devices() == ["mlx5_0", "mlx5_1"]
