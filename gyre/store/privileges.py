"""Giving up root. Postgres refuses to run as root, which a container's only user often is."""

from __future__ import annotations

import ctypes
import os
import pwd
import stat
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2
_PR_SET_KEEPCAPS = 8
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_CAP_DAC_OVERRIDE = 1
_CAPABILITY_VERSION_3 = 0x20080522


def unprivileged_account() -> pwd.struct_passwd | None:
    """The account that a server takes when this process is root: `postgres`, else `nobody`. None: not root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise SystemExit("postgres: running as root and no account named 'postgres' or 'nobody' exists; add one (useradd)")


def become(account: pwd.struct_passwd, must_reach: Sequence[Path]) -> None:
    """Turn this process into `account` for good.

    Where a parent folder of `must_reach` is closed to others (a checkout under /root), the process keeps the one
    capability that lets it pass, so that no permission on disk has to be widened.
    """
    closed = next((c for path in must_reach for c in _closed_parents(path, account)), None)
    if closed is not None and sys.platform != "linux":
        raise SystemExit(f"postgres: user {account.pw_name!r} cannot enter {closed}; chmod o+x it or move the folder")
    death_signal = parent_death_signal()  # the kernel forgets it when the user changes
    os.umask(0o077)
    os.setgroups([])
    os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
    if closed is None:
        os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
    else:
        _setuid_keeping_passage(account.pw_uid, closed, account.pw_name)
    set_parent_death_signal(death_signal)


def parent_death_signal() -> int:
    """The signal that this process gets when its parent ends; 0: none, or not Linux."""
    signal = ctypes.c_int(0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(signal), 0, 0, 0)
    return signal.value


def set_parent_death_signal(signal: int) -> None:
    """Ask for `signal` when the parent (strictly: the thread that started this process) ends. Linux; else nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal, 0, 0, 0)


def _closed_parents(path: Path, account: pwd.struct_passwd) -> list[Path]:
    """Folders above `path` that `account` may not enter."""
    closed = []
    for parent in path.absolute().parents:
        info = parent.stat()
        owner, group = info.st_uid == account.pw_uid, info.st_gid == account.pw_gid
        needed = stat.S_IXUSR if owner else stat.S_IXGRP if group else stat.S_IXOTH
        if not info.st_mode & needed:
            closed.append(parent)
    return closed


def _setuid_keeping_passage(uid: int, closed: Path, name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    os_error = f"postgres: user {name!r} cannot enter {closed}; chmod o+x it or put the data elsewhere"
    if libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0) != 0:
        raise SystemExit(os_error)
    os.setresuid(uid, uid, uid)
    mask = 1 << _CAP_DAC_OVERRIDE
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    data = struct.pack("=6I", mask, mask, mask, 0, 0, 0)  # effective, permitted, inheritable; low word, then high
    if libc.capset(header, data) != 0 or libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_OVERRIDE, 0, 0):
        raise SystemExit(os_error)
