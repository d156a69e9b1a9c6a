"""A second machine, as far as the network knows: a namespace behind a cable that can be cut. Needs root, ip and tc."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_BLACK_HOLE = "tbf rate 1kbit burst 10b limit 10b"
"""Takes no packet that is longer than ten bytes: all are dropped, and nobody is told."""


class Machine:
    """At `host`. A command that begins with `within` runs there."""

    def __init__(self) -> None:
        self._name, self._near, self._far = (f"{kind}{os.getpid()}" for kind in ("gyre", "gn", "gf"))
        subnet = f"10.77.{os.getpid() % 250}"
        self.host = f"{subnet}.2"
        self.within = ["ip", "netns", "exec", self._name]
        run("ip", "netns", "add", self._name)
        run("ip", "link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self._name)
        run("ip", "addr", "add", f"{subnet}.1/24", "dev", self._near)
        run("ip", "-n", self._name, "addr", "add", f"{self.host}/24", "dev", self._far)
        run("ip", "link", "set", self._near, "up")
        for device in ("lo", self._far):
            run("ip", "-n", self._name, "link", "set", device, "up")
        # Else a machine on the same cable that answers nothing is soon known to be away, which a distant one is not.
        link = run("ip", "-n", self._name, "-o", "link", "show", self._far)
        address = link.partition("link/ether ")[2].split()[0]
        run("ip", "neigh", "replace", self.host, "lladdr", address, "nud", "permanent", "dev", self._near)

    def cut(self) -> None:
        """From now on no packet arrives, in either direction; nothing is closed."""
        for where, device in self._ends():
            run("tc", *where, "qdisc", "replace", "dev", device, "root", *_BLACK_HOLE.split())

    def heal(self) -> None:
        for where, device in self._ends():
            run("tc", *where, "qdisc", "del", "dev", device, "root")

    def _ends(self) -> list[tuple[list[str], str]]:
        return [([], self._near), (["-n", self._name], self._far)]

    def remove(self) -> None:
        run("ip", "link", "del", self._near)
        run("ip", "netns", "del", self._name)


@contextmanager
def second_machine() -> Iterator[Machine]:
    """Skips the test where there cannot be one."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("a network of our own needs root, and ip and tc (Debian: iproute2)")
    if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine gives no network namespaces")
    machine = Machine()
    try:
        yield machine
    finally:
        machine.remove()


def run(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout
