"""The shepherd: a small detached process that owns one harness, from its first instruction to its last descendant.

It imports only the standard library and never Gyre, because it runs in two places: as a script (`python -I -S
shepherd.py`, the cold path) and inside a warm fork-server that belongs to the harness's own environment.

Files in the folder that it is given:
  shepherd.lock  flock-ed for as long as the shepherd lives: at most one shepherd per folder, whatever is retried
  pid.json       who runs; written before the harness may execute anything
  harness.log    the harness's stdout and stderr
  exit.json      how it ended; written atomically, after the last descendant is gone
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

PID_FILE, EXIT_FILE, LOG_FILE, LOCK_FILE = "pid.json", "exit.json", "harness.log", "shepherd.lock"
MARKER = "GYRE_HARNESS_MARK"  # environment variable by which strays are found once their shepherd is gone

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_OURS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_KEEP_EVERY_S = 1.0

Spec = dict[str, Any]
"""{folder, argv, env, cwd, grace_s}: one launch, as JSON."""


# --- /proc ------------------------------------------------------------------------------------------------------------


def stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the third (state) on; None when there is no such process, or it is hidden."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # the last: another user's, under hidepid=1
        return None


def start_time(pid: int) -> int | None:
    """Start of a living process in clock ticks since boot; None when it is gone or only a zombie."""
    fields = stat_fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def boot_id() -> str:
    """Identity of this boot, without which a pid and a start time could match by chance after a reboot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def descendants(root: int) -> list[int]:
    """Living descendants of `root`, whatever session or process group they went to."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := stat_fields(int(name))) is not None and fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    level = children.get(root, [])
    while level:
        found += level
        level = [child for pid in level for child in children.get(pid, [])]
    return found


def send(pids: list[int], signum: int) -> None:
    """Signal every pid that still exists. What an agent started by sudo is out of reach, and no reason to stop."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def kill_all(find: Callable[[], list[int]]) -> None:
    """KILL everything that `find` finds; first stop it all, so that nothing can fork its way out of the list."""
    stopped: set[int] = set()
    while new := [pid for pid in find() if pid not in stopped]:
        send(new, signal.SIGSTOP)
        stopped.update(new)
    send(list(stopped), signal.SIGKILL)


def write_json(path: str, value: Spec) -> None:
    """Write a file that is either absent or whole."""
    draft = f"{path}.{os.getpid()}"
    with open(draft, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(draft, path)


# --- the life of one harness ------------------------------------------------------------------------------------------


def detach(
    spec: Spec, reply_fd: int, run: Callable[[Spec], NoReturn] | None = None, close: tuple[int, ...] = ()
) -> None:
    """Fork a shepherd that is nobody's child, and return in the caller.

    The shepherd writes one JSON line to `reply_fd`: {"attached": bool} or {"error": text}. `run` is what the harness
    process does (warm); None executes `spec["argv"]`. `close` are descriptors that the shepherd must not keep.
    """
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        for fd in close:
            os.close(fd)
        _shepherd(spec, reply_fd, run)
    except BaseException:
        _reply(reply_fd, {"error": traceback.format_exc(limit=-1).strip().replace("\n", " ")})
    finally:
        os._exit(70)


def _shepherd(spec: Spec, reply_fd: int, run: Callable[[Spec], NoReturn] | None) -> NoReturn:
    folder: str = spec["folder"]
    signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)
    for signum in _OURS:
        signal.signal(signum, signal.SIG_DFL)
    lock = os.open(f"{folder}/{LOCK_FILE}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        first = not os.path.exists(f"{folder}/{PID_FILE}")
    except BlockingIOError:
        first = False
    if not first:
        _reply(reply_fd, {"attached": True})
        os._exit(0)

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    mark = os.urandom(8).hex()
    spec = {**spec, "env": {**spec["env"], MARKER: mark}}
    log = os.open(f"{folder}/{LOG_FILE}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    gate, open_gate = os.pipe()
    started = time.time()
    harness = os.fork()
    if harness == 0:
        # The harness dies with its shepherd: nobody else would know of it.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.close(open_gate)
        _harness(spec, gate, log, (lock, reply_fd), run)
    facts = {
        "pid": os.getpid(),
        "start_time": start_time(os.getpid()),
        "boot_id": boot_id(),
        "harness_pid": harness,
        "harness_start_time": start_time(harness),
        "mark": mark,
        "grace_s": spec["grace_s"],
        "started": started,
    }
    write_json(f"{folder}/{PID_FILE}", facts)
    os.write(open_gate, b"1")
    os.close(open_gate)
    os.close(gate)
    _reply(reply_fd, {"attached": False})
    _stdio(log)
    os.close(log)

    def keep() -> None:
        """An agent may remove what it should not; who looks here must still find what runs."""
        if not os.path.exists(f"{folder}/{PID_FILE}"):
            os.makedirs(folder, exist_ok=True)
            write_json(f"{folder}/{PID_FILE}", facts)

    status, reason, left_over = _watch(harness, spec["grace_s"], keep)
    keep()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    write_json(
        f"{folder}/{EXIT_FILE}",
        {
            "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            "reason": reason,
            "left_over": left_over,
            "cpu_s": round(usage.ru_utime + usage.ru_stime, 4),
            "started": started,
            "ended": time.time(),
        },
    )
    os._exit(0)


def _watch(harness: int, grace_s: float, keep: Callable[[], None]) -> tuple[int, str, int]:
    """Reap until no descendant is left: (wait status of the harness, reason, processes that it left behind).

    As a subreaper the shepherd is the parent of every orphan below it, so no child means no descendant.
    """
    me = os.getpid()
    status, reason, left_over = 0, "exited", 0
    ended = asked = False
    kill_at: float | None = None
    pause_s = 0.02
    while True:
        try:
            while (pair := os.waitpid(-1, os.WNOHANG))[0]:
                if pair[0] == harness:
                    ended, status = True, pair[1]
        except ChildProcessError:
            return status, reason, left_over
        if kill_at is None and (ended or asked):
            living = descendants(me)
            left_over = len(living) if ended else 0
            send(living, signal.SIGTERM)
            send(living, signal.SIGCONT)
            kill_at = time.monotonic() + grace_s
        wait_s = _KEEP_EVERY_S if kill_at is None else kill_at - time.monotonic()
        if wait_s <= 0:
            kill_all(lambda: descendants(me))
            wait_s, pause_s = pause_s, min(pause_s * 2, _KEEP_EVERY_S)
        came = signal.sigtimedwait(_OURS, wait_s)
        if came is None and kill_at is None:
            keep()
        if came is not None and came.si_signo != signal.SIGCHLD and not ended:
            asked, reason = True, "killed"


def _harness(
    spec: Spec, gate: int, log: int, close: tuple[int, ...], run: Callable[[Spec], NoReturn] | None
) -> NoReturn:
    try:
        os.setsid()
        for fd in close:
            os.close(fd)
        if not os.read(gate, 1):
            os._exit(70)  # the shepherd died before it could say that it runs
        os.close(gate)
        _stdio(log)
        os.close(log)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.chdir(spec["cwd"])
        if run is not None:
            run(spec)
        for signum in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # what Python changes at its start
            signal.signal(signum, signal.SIG_DFL)
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
    except OSError as error:
        print(f"cannot run {spec['argv'][0]!r} in {spec['cwd']}: {error}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
    finally:
        os._exit(70)


def _stdio(log: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _reply(fd: int, value: Spec) -> None:
    with contextlib.suppress(OSError):  # whoever asked has died; what was started goes on
        os.write(fd, json.dumps(value).encode() + b"\n")
    os.close(fd)


if __name__ == "__main__":
    detach(json.load(sys.stdin), os.dup(1))
