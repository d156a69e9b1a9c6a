"""The few lines of a Dockerfile that say which files an agent gets: WORKDIR and plain COPY.

Nothing is built. `RUN` and the rest are passed over: what they install is not there in a local workspace.
"""

from __future__ import annotations

import json
import posixpath
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from gyre.tasks.harbor import Task, TaskError

_ADVICE = "; put the files in environment/workspace/ instead"


def copies(task: Task) -> list[tuple[Path, PurePosixPath]]:
    """(file or folder below environment/, its place relative to the workspace) for every COPY line, in order.

    The workspace is `environment.workdir`, else the Dockerfile's last WORKDIR, else `/app`. Of a folder the contents
    are copied, as Docker does. Raises TaskError for every form of COPY or ADD that is not understood.
    """
    path = task.environment_dir / "Dockerfile"
    if not path.is_file():
        raise TaskError(f"{task.environment_dir}: has neither workspace/ nor a Dockerfile; put the agent's files in "
                        "environment/workspace/")  # fmt: skip
    lines = list(_instructions(path))
    workdirs = [rest for _, name, rest in lines if name == "WORKDIR"]
    root = task.workdir or (workdirs[-1] if workdirs else "/app")
    if not root.startswith("/"):
        raise TaskError(f"{path}: WORKDIR {root}: a relative one is not understood{_ADVICE}")
    found: list[tuple[Path, PurePosixPath]] = []
    current = root
    for number, name, rest in lines:
        where = f"{path}:{number}: {name} {rest}"
        if name == "WORKDIR":
            current = posixpath.join(current, rest)
        elif name == "ADD":
            raise TaskError(f"{where}: ADD is not understood; use COPY, or put the files in environment/workspace/")
        elif name == "COPY":
            found += _copy(task.environment_dir, root, current, rest, where)
    if not found:
        raise TaskError(f"{path}: has no COPY line and there is no environment/workspace/{_ADVICE}")
    return found


def _copy(base: Path, root: str, current: str, rest: str, where: str) -> Iterator[tuple[Path, PurePosixPath]]:
    try:
        words = [str(w) for w in json.loads(rest)] if rest.startswith("[") else shlex.split(rest)
    except ValueError as error:
        raise TaskError(f"{where}: cannot be parsed ({error}){_ADVICE}") from error
    words = [w for w in words if not w.startswith(("--chown=", "--link"))]
    if len(words) < 2 or any(w.startswith(("--", "<<")) or "$" in w for w in words):
        raise TaskError(
            f"{where}: only `COPY source... destination` without options or variables is understood{_ADVICE}"
        )
    *sources, last = words
    destination = posixpath.normpath(posixpath.join(current, last))
    inside = posixpath.relpath(destination, posixpath.normpath(root))
    if inside == ".." or inside.startswith("../"):
        raise TaskError(f"{where}: goes to {destination}, outside the workspace {root}{_ADVICE}")
    origins = [origin for source in sources for origin in _match(base, source, where)]
    into = last.endswith("/") or last in (".", "..") or len(origins) > 1 or destination == posixpath.normpath(root)
    for origin in origins:
        place = PurePosixPath(inside)
        yield origin, place / origin.name if into and not origin.is_dir() else place


def _match(base: Path, source: str, where: str) -> list[Path]:
    pattern = posixpath.normpath(source.lstrip("/"))
    if pattern.startswith(".."):
        raise TaskError(f"{where}: {source} is outside environment/{_ADVICE}")
    found = [base] if pattern == "." else sorted(base.glob(pattern))
    if not found:
        raise TaskError(f"{where}: there is no {source} in {base}; add it or remove the line")
    return found


def _instructions(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line number, instruction in capitals, the rest), comments dropped and continued lines joined."""
    start, text = 0, ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        start = start if text else number
        text += line.strip()
        if text.endswith("\\"):
            text = text[:-1] + " "
            continue
        name, _, rest = text.partition(" ")
        yield start, name.upper(), rest.strip()
        text = ""
