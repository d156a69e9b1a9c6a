"""Harnesses that come from npm: where `make harnesses` put them (pins: requirements/node/package.json)."""

from __future__ import annotations

import json
import os
from pathlib import Path

from gyre.harness.base import HarnessError, places

VARIABLE = "GYRE_NODE_HARNESSES"
DEFAULT = Path(".venvs/node")


def install() -> Path:
    """The folder that holds node_modules: $GYRE_NODE_HARNESSES, else `.venvs/node` of the repository.

    Raises HarnessError where it is not there.
    """
    candidates = places(VARIABLE, DEFAULT)
    for folder in candidates:
        if (folder / "node_modules").is_dir():
            return folder
    raise HarnessError(
        f"no harnesses from npm in {candidates[0]}; run `make harnesses` (it needs npm), or set {VARIABLE} to a folder "
        "whose node_modules has them"
    )


def package(name: str, version: str | None = None) -> Path:
    """The folder of an installed package, under whatever alias it is installed. Raises HarnessError.

    `version` None: the one that is installed under the package's own name.
    """
    modules = install() / "node_modules"
    found: dict[str, Path] = {}
    for folder in [modules / name, *sorted(modules.iterdir())]:
        if (facts := _facts(folder)) is not None and facts.get("name") == name:
            found.setdefault(str(facts["version"]), folder)
    if version is None and found:
        return next(iter(found.values()))
    if version in found:
        return found[version]
    wanted = name if version is None else f"{name}@{version}"
    there = f"there is {', '.join(sorted(found))}" if found else "there is none"
    raise HarnessError(
        f"{wanted} is not in {modules} ({there}); run `make harnesses`, or "
        f"`npm install --prefix {modules.parent} --ignore-scripts another-name@npm:{wanted}`"
    )


def binary(package_folder: Path, scope: str, prefix: str, *parts: str) -> Path:
    """A native program of a package whose platform packages are `{scope}/{prefix}*`, at `parts` in the one installed.

    npm puts them beside the package, or below it where two versions of it are installed. Raises HarnessError.
    """
    version = str((_facts(package_folder) or {}).get("version", ""))
    for modules in (package_folder / "node_modules", install() / "node_modules"):
        for folder in sorted((modules / scope).glob(f"{prefix}*")):
            if not str((_facts(folder) or {}).get("version", "")).startswith(version):
                continue
            for path in sorted(folder.glob("/".join(parts))):
                if os.access(path, os.X_OK):
                    return path
    raise HarnessError(
        f"{package_folder}: npm installed no {scope}/{prefix}* package of version {version} for this machine; run "
        "`make harnesses` on a system that the harness supports"
    )


def node() -> Path:
    """Node.js 22, as installed beside the harnesses. Raises HarnessError."""
    for path in sorted((install() / "node_modules").glob("node-linux-*/bin/node")):
        if os.access(path, os.X_OK):
            return path
    raise HarnessError(f"no Node.js in {install()}; run `make harnesses`")


def _facts(folder: Path) -> dict[str, object] | None:
    try:
        facts: dict[str, object] = json.loads((folder / "package.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return facts
