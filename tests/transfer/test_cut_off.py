"""The way to the publisher breaks in the middle of a pull: refused within seconds, and nothing is written afterwards
to what others have by then."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gyre.transfer import PublisherGone, mooncake, open_puller, sockets
from tests.transfer.network import second_machine
from tests.transfer.test_transfer import BACKENDS, Publisher, assert_untorn, interrupt, publisher_process, refused


def until(true: Callable[[], bool], limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.2)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull takes two seconds of silence for the end, not ten."""
    monkeypatch.setattr(mooncake, "SILENCE_S", 2.0)
    monkeypatch.setattr(sockets, "TIMEOUT_S", 2.0)


def all_given_back() -> bool:
    mooncake._give_back_late()
    return not mooncake._late


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("backend", BACKENDS)
def test_packets_are_dropped_in_the_middle_of_a_pull(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with second_machine() as there, publisher_process(backend, 48, there.host, there.within) as publisher:
        puller = open_puller(publisher.ticket)
        version, held = puller.pull()
        publisher.publish(1)
        interrupt(backend, monkeypatch, there.cut)
        refused(puller)
        assert_untorn(version, held)
        refused(open_puller(publisher.ticket))
        there.heal()
        goes_on(puller, publisher)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_publisher_stops_in_the_middle_of_a_pull(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had been asked for, it sends when it wakes up: into memory that nobody else has yet."""
    with publisher_process(backend, 48) as publisher:
        puller = open_puller(publisher.ticket)
        version, held = puller.pull()
        publisher.publish(1)
        interrupt(backend, monkeypatch, lambda: os.kill(publisher.process.pid, signal.SIGSTOP))
        refused(puller)
        assert_untorn(version, held)
        os.kill(publisher.process.pid, signal.SIGCONT)
        goes_on(puller, publisher)


def goes_on(puller: Any, publisher: Publisher) -> None:
    """Pulls are whole again, while the publisher writes both slots anew; what was late has been given back."""
    for version in (2, 3, 4):
        publisher.publish(version)
        for again in range(5):
            try:
                found, tensors = puller.pull()
                break
            except PublisherGone:  # a connection of before the cut
                assert again < 4
        assert found == version
        assert_untorn(found, tensors)
    until(all_given_back)


def test_what_is_on_its_way_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A puller that is thrown away gives back only what nothing will be written to."""
    with publisher_process("mooncake", 48) as publisher:
        puller: Any = open_puller(publisher.ticket)
        puller.pull()
        publisher.publish(1)
        chunks: list[int] = []
        begin = mooncake._Memory.begin

        def stops(self: Any, peer: str, target: Any, address: int) -> int | None:
            if target.nbytes > 1 << 20:
                chunks.append(target.data_ptr())
            if len(chunks) == 1:
                os.kill(publisher.process.pid, signal.SIGSTOP)
            return begin(self, peer, target, address)

        monkeypatch.setattr(mooncake._Memory, "begin", stops)
        refused(puller)
        del puller
        assert chunks
        assert all(any(chunk in kept for kept in spans()) for chunk in chunks), "what has not come is kept"
        os.kill(publisher.process.pid, signal.SIGCONT)
        until(all_given_back)


def spans() -> list[range]:
    """Memory that is kept for what is late."""
    return [range(a, a + t.nbytes) for _, registered, _ in mooncake._late for a, t in registered.items()]


class Asked:
    """In the place of the engine: its reads have ended, and it does something else while it is asked for one."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.meanwhile = meanwhile
        self.unregistered: list[int] = []

    def transfer_check_status(self, read: int) -> int:
        self.meanwhile()
        return mooncake._ARRIVED

    def unregister_memory(self, address: int) -> None:
        self.unregistered.append(address)


def test_two_threads_give_back_what_is_late() -> None:
    """Each entry goes to one of them, and who finds nothing more is content."""
    until(all_given_back)

    def in_another_thread() -> None:
        other = threading.Thread(target=mooncake._give_back_late)
        other.start()
        other.join()

    first, second = Asked(in_another_thread), Asked(lambda: None)
    for address, asked in enumerate((first, second)):
        mooncake._late.append((asked, {address: torch.zeros(1)}, {7}))
    mooncake._give_back_late()
    assert not mooncake._late
    assert (first.unregistered, second.unregistered) == ([0], [1])


def test_a_publisher_dies_while_chunks_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with publisher_process("mooncake", 48) as publisher:
        puller = open_puller(publisher.ticket)
        version, held = puller.pull()
        publisher.publish(1)
        begin, begun = mooncake._Memory.begin, []

        def kills(*args: Any) -> int | None:
            read = begin(*args)
            begun.append(read)
            if len(begun) == 6:
                publisher.kill()
            return read

        monkeypatch.setattr(mooncake._Memory, "begin", kills)
        refused(puller)
        assert_untorn(version, held)
        until(all_given_back)
