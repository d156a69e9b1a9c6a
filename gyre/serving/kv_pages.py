"""Pages of keys and values in a folder that the cells of one machine share: one file a page, by policy version.

A page is written beside its place and renamed into it, so it is whole or absent; its checksum, over its version, its
name and its bytes, is looked at whenever it is read. What one cell wrote outlives that cell. The folder is best in
memory (`/dev/shm`).
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import shutil
import struct
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import xxhash

log = logging.getLogger(__name__)

Blocks = Sequence[memoryview]
"""The bytes of one page, in as many pieces as the server keeps them in."""

_HEADER = struct.Struct("<8sQQ")  # magic, XXH3, number of the page's bytes
HEADER = _HEADER.size
"""Bytes of a page's file before its own."""

_MAGIC = b"gyre-kv3"
_SWEEP_PAGES = 64
"""Pages that one writer adds between two looks at the folder's size."""


class PageFolder:
    """`folder` holds `v<version>/<key>`, at most about `budget` bytes: the pages longest unused go first.

    Every method may be called from several threads and several processes.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder, self.budget = folder, budget
        self.counts: Counter[str] = Counter()
        """Pages by what became of them: stored, found, missing, corrupt, failed, dropped."""
        self._beside = f".{uuid.uuid4().hex}-"  # not the process id: containers that share the folder may share those
        self._serial = itertools.count()
        self._added = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def has(self, version: str, key: str) -> bool:
        """Whether the page was stored; only reading says whether it is whole."""
        return self._path(version, key).exists()

    def put(self, version: str, key: str, blocks: Blocks) -> bool:
        """Store a page, unless it is there. False where the disk will not have it (logged, counted)."""
        path = self._path(version, key)
        if path.exists():
            return True
        check, size = _checksum(version, key, blocks), sum(len(b) for b in blocks)
        beside = path.with_name(f"{self._beside}{next(self._serial)}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(beside, "xb", buffering=0) as file:
                written = os.writev(file.fileno(), [_HEADER.pack(_MAGIC, check, size), *blocks])
                if written != HEADER + size:
                    raise OSError(f"{written} of {HEADER + size} bytes written")
            beside.replace(path)
        except OSError as error:
            self.counts["failed"] += 1
            log.warning("kv: page not stored in %s: %s", path.parent, error)
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            return False
        self.counts["stored"] += 1
        self._added += 1
        if self._added % _SWEEP_PAGES == 0:
            self._sweep(HEADER + size)
        return True

    def get(self, version: str, key: str, blocks: Blocks) -> bool:
        """Read a page into `blocks`. False: it is not there, or not whole (logged, counted); `blocks` is then garbage.

        `blocks` have the sizes of those that were put.
        """
        path = self._path(version, key)
        header = bytearray(HEADER)
        size = sum(len(b) for b in blocks)
        try:
            with open(path, "rb", buffering=0) as file:
                read = os.readv(file.fileno(), [header, *blocks])
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            self.counts["missing" if gone else "failed"] += 1
            if not gone:
                log.warning("kv: %s cannot be read, its tokens are computed anew: %s", path, error)
            return False
        check = _checksum(version, key, blocks)
        if read != HEADER + size or _HEADER.unpack(header) != (_MAGIC, check, size):
            self.counts["corrupt"] += 1
            log.warning("kv: %s is damaged and removed, its tokens are computed anew", path)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return False
        self.counts["found"] += 1
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)  # used now
        return True

    def keep_from(self, version: int) -> None:
        """Remove the pages of policy versions before `version`."""
        for folder in self._versions():
            if int(folder.name[1:]) < version:
                shutil.rmtree(folder, ignore_errors=True)

    def clear(self) -> None:
        """Remove all pages."""
        for folder in self._versions():
            shutil.rmtree(folder, ignore_errors=True)

    def _path(self, version: str, key: str) -> Path:
        return self.folder / f"v{version}" / key

    def _versions(self) -> list[Path]:
        return [f for f in self.folder.glob("v*") if f.name[1:].isdigit()]

    def _sweep(self, page: int) -> None:
        found: list[tuple[float, str]] = []
        for folder in self._versions():
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        found.append((entry.stat().st_mtime, entry.path))
        room = self.budget // page
        if len(found) <= room:
            return
        for _, path in sorted(found)[: len(found) - int(room * 0.9)]:
            self.counts["dropped"] += 1
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _checksum(version: str, key: str, blocks: Blocks) -> int:
    """A page that lies in another's place, or in another version's, is a damaged one."""
    state = xxhash.xxh3_64(f"{version}/{key}/".encode())
    for block in blocks:
        state.update(block)
    return state.intdigest()


class FolderUse:
    """Holds a shared folder while its processes live. Who comes first finds it empty, who leaves last removes it.

    Folders beside it that nobody holds any more, since all their processes were killed, are removed as well: they may
    lie in memory.
    """

    def __init__(self, folder: Path) -> None:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._path = folder, folder.with_name(folder.name + ".lock")
        _remove_unheld(folder.parent)
        while True:
            self._lock = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            if _taken(self._lock) and _is_at(self._lock, self._path):
                shutil.rmtree(folder, ignore_errors=True)  # of processes that were killed
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            if _is_at(self._lock, self._path):
                return
            os.close(self._lock)  # who held it left meanwhile, and took the file along

    def close(self) -> None:
        """Let go; idempotent."""
        if self._lock >= 0:
            if _taken(self._lock) and _is_at(self._lock, self._path):
                _remove(self._folder, self._path)
            os.close(self._lock)
            self._lock = -1


def _taken(lock: int) -> bool:
    """Whether nobody else held the lock, which is this process's alone now."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False


def _remove(folder: Path, path: Path) -> None:
    """The lock at `path` is this process's alone, and so is the right to remove it."""
    shutil.rmtree(folder, ignore_errors=True)
    path.unlink(missing_ok=True)


def _remove_unheld(root: Path) -> None:
    for path in root.glob("*.lock"):
        try:
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # who held it has left
            continue
        try:
            if _taken(lock) and _is_at(lock, path):
                _remove(path.with_suffix(""), path)
        finally:
            os.close(lock)
