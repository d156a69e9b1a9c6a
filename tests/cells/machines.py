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

_count = itertools.count()


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
        """From now on every packet between them is lost; nobody is told."""
        _ip("link", "set", self.device, "down")

    def heal(self) -> None:
        """The opposite of `cut`."""
        _ip("link", "set", self.device, "up")


@contextlib.contextmanager
def two_machines() -> Iterator[Machines]:
    """This machine and another, for the length of the block. Raises NoMachine."""
    number = next(_count)  # what was deleted is not gone at once
    name, net = f"gyre{os.getpid()}-{number}", f"198.18.{(os.getpid() + number) % 256}"  # a block reserved for tests
    here, there = f"{net}.1", f"{net}.2"
    inside, outside = "eth0", f"gy{os.getpid()}-{number}"
    try:
        _ip("netns", "add", name)
        try:
            _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
            _ip("address", "add", f"{here}/30", "dev", outside)
            _ip("link", "set", outside, "up")
            _ip("-n", name, "address", "add", f"{there}/30", "dev", inside)
            _ip("-n", name, "link", "set", inside, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            yield Machines(here, there, ("ip", "netns", "exec", name), outside)
        finally:
            _ip("netns", "delete", name)  # and with it the pair of devices
    except FileNotFoundError as error:
        raise NoMachine("no `ip`; install iproute2") from error


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise NoMachine(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
