"""Another machine, as far as the network goes: a network namespace with an address that this one reaches, and back.

What listens at 127.0.0.1 here is not reached from there. Files are the same: they stand for a shared file system.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

_count = itertools.count()
NOBODY = "02:00:00:00:00:01"
"""An Ethernet address of no machine."""
INSIDE = "eth0"
"""The other machine's device."""


class NoMachine(Exception):
    """A namespace cannot be made here; the message says why."""


@dataclass(frozen=True)
class Machines:
    """`here` and `there` are the two addresses; `prefix` is the argv that runs a command there."""

    here: str
    there: str
    prefix: tuple[str, ...]
    device: str
    """Of this machine, in the network that they share."""

    def cut(self) -> None:
        """From now on every packet between them is lost; nobody is told, not even who would connect."""
        for where, device, other in self._ends:
            _ip(*where, "neighbour", "replace", other, "lladdr", NOBODY, "nud", "permanent", "dev", device)

    def heal(self) -> None:
        """The opposite of `cut`."""
        for where, device, _ in self._ends:
            _ip(*where, "neighbour", "flush", "dev", device, "nud", "permanent")

    @property
    def name(self) -> str:
        """Of the namespace."""
        return self.prefix[-1]

    @property
    def _ends(self) -> list[tuple[tuple[str, ...], str, str]]:
        """Of each machine: how `ip` is told to be there, its device, and the other's address."""
        return [((), self.device, self.there), (("-n", self.name), INSIDE, self.here)]

    def processes(self) -> set[int]:
        """Pids of what runs there."""
        return {int(pid) for pid in _ip("netns", "pids", self.name).split()}


@contextlib.contextmanager
def two_machines() -> Iterator[Machines]:
    """This machine and another, for the length of the block. Raises NoMachine."""
    number = next(_count)  # what was deleted is not gone at once
    name, net = f"gyre{os.getpid()}-{number}", f"198.18.{(os.getpid() + number) % 256}"  # a block reserved for tests
    here, there = f"{net}.1", f"{net}.2"
    outside = f"gy{os.getpid()}-{number}"
    try:
        _ip("netns", "add", name)
        try:
            _ip("link", "add", outside, "type", "veth", "peer", "name", INSIDE, "netns", name)
            _ip("address", "add", f"{here}/30", "dev", outside)
            _ip("link", "set", outside, "up")
            _ip("-n", name, "address", "add", f"{there}/30", "dev", INSIDE)
            _ip("-n", name, "link", "set", INSIDE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            yield Machines(here, there, ("ip", "netns", "exec", name), outside)
        finally:
            _ip("netns", "delete", name)  # and with it the pair of devices
    except FileNotFoundError as error:
        raise NoMachine("no `ip`; install iproute2") from error


@contextlib.contextmanager
def two_machines_or_skip() -> Iterator[Machines]:
    """As `two_machines`; where there cannot be two, the test is skipped and says why."""
    with contextlib.ExitStack() as stack:
        try:
            machines = stack.enter_context(two_machines())
        except NoMachine as why:
            pytest.skip(f"no second machine: {why}")
        yield machines


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise NoMachine(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
