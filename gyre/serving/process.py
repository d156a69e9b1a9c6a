"""Child processes that die with their parent and stay on their own cores."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: nothing may be loaded between fork and exec


def child_setup(cpus: Sequence[int] = ()) -> Callable[[], None]:
    """A `preexec_fn`: the child is killed when its parent dies, and runs on `cpus` only (empty: anywhere).

    Linux ties the signal to the *thread* that forks: start such children from a thread that lives as long as the
    process, best the main one.
    """
    parent = os.getpid()
    cores = frozenset(cpus)

    def setup() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before prctl could take effect
            os._exit(127)
        if cores:
            os.sched_setaffinity(0, cores)

    return setup


def die_with_parent(keeper: int | None = None) -> None:
    """This process is killed when its parent dies: for a child of a program that does not see to it itself.

    `keeper`: pid of the parent's own parent, by which a process sees that it was orphaned before it could ask.
    """
    parent = os.getppid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or (keeper is not None and _parent_of(parent) != keeper):
        os._exit(127)


def _parent_of(pid: int) -> int | None:
    """None: there is no such process."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[1])


def end_group(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a child that leads its own process group, and whatever of the group outlives it. Blocks `grace_s` at most."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def family(pid: int | None) -> list[int]:
    """A process and its descendants, by their ids; none for None. From /proc, without a look at every process."""
    found: list[int] = []
    waiting = [] if pid is None else [pid]
    while waiting:
        found.append(waiting.pop())
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it, or a thread of it, has just ended
            for task in Path("/proc", str(found[-1]), "task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
    return found


def rss_mb(pids: Iterable[int]) -> float:
    """Megabytes of memory that processes have in RAM; those that have ended have none.

    Pages that several of them share count once for each.
    """
    pages = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pages += int(Path("/proc", str(pid), "statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def usable_cores(cpus: Sequence[int], cpus_of_run: Sequence[int], allowed: AbstractSet[int]) -> list[int]:
    """The cores for a cell's `cpus` where this process may use `allowed` ones: the same ones if it may use all
    `cpus_of_run`, else those at the same places among the allowed, so that cells keep apart as far as possible.

    Containers and batch systems grant other cores than 0, 1, …, or fewer, and pinning to a foreign one is an error.
    """
    if allowed >= set(cpus_of_run):
        return list(cpus)
    places = sorted(allowed)
    return sorted({places[c % len(places)] for c in cpus})
