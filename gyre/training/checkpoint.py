"""Checkpoints: a folder `v<k>` that is whole or not there.

It is a policy folder in Hugging Face's format (weights, config.json, tokenizer files: SGLang and transformers load it),
plus `optimizer.pt` and `meta.json`. It is written beside its place, forced to disk, and renamed into it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import pickle
import re
import shutil
import uuid
from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from gyre.training.weights import copy_companions, set_dtype_in_config, write_hf_weights

_META = "meta.json"
_OPTIMIZER = "optimizer.pt"
_VERSION = re.compile(r"v(\d+)(\.\d+)?")


class CheckpointError(Exception):
    """A checkpoint that cannot be used, or written; the message is one line and names the folder."""


@dataclass(frozen=True)
class CheckpointMeta:
    """What a checkpoint says of itself."""

    run_id: str
    version: int
    """Optimizer steps that made it."""
    step_id: int | None
    """Row of the step that made it."""
    seed: int


def version_folder(root: Path, version: int) -> Path:
    """Where the checkpoint of `version` lies under `root`."""
    return root / f"v{version}"


def save_checkpoint(
    root: Path, meta: CheckpointMeta, weights: Mapping[str, Tensor], optimizer: Mapping[str, Any], policy: Path
) -> Path:
    """Write the checkpoint of `meta.version` under `root`; returns its folder, durable when this returns.

    Files of the folder `policy` other than weights are copied along. No folder is ever replaced: where `v<k>` is there,
    of a process that died before it could commit it, or of one that took this one's place, it becomes `v<k>.2`, and so
    on; the version's row says which of them counts. `weights` are float32 by Hugging Face's names. Raises
    CheckpointError, and nothing is left, where it cannot be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    name = version_folder(root, meta.version).name
    draft = root / f".{name}.{uuid.uuid4().hex}"
    draft.mkdir()
    try:
        copy_companions(policy, draft)
        set_dtype_in_config(draft, torch.float32)
        write_hf_weights(weights, draft)
        torch.save(dict(optimizer), draft / _OPTIMIZER)
        (draft / _META).write_text(json.dumps(asdict(meta), indent=2) + "\n", encoding="utf-8")
        for file in draft.iterdir():
            _sync(file)
        _sync(draft)
        final = _place(draft, root, name)
    except (
        OSError,
        RuntimeError,
        SafetensorError,
    ) as error:  # a full disk, as each writer says it
        free = shutil.disk_usage(root).free
        raise CheckpointError(
            f"{root}: the checkpoint of version {meta.version} cannot be written, where {free / 1e6:.0f} MB are free: "
            f"make room, or keep fewer (checkpoint.keep); it is tried again ({type(error).__name__}: {error})"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    _sync(root)
    return final


def read_meta(folder: Path) -> CheckpointMeta | None:
    """What the checkpoint in `folder` says of itself; None for a plain policy folder, without an optimizer.

    Raises CheckpointError where the file is not what `save_checkpoint` writes.
    """
    path = folder / _META
    if not path.is_file():
        return None
    try:
        return CheckpointMeta(**json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, TypeError) as error:
        raise CheckpointError(f"{path}: not a checkpoint's meta file: {error}") from error


def read_optimizer(folder: Path) -> dict[str, Any]:
    """State of the optimizer. Raises CheckpointError where it is missing or broken."""
    path = folder / _OPTIMIZER
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; the checkpoint is incomplete") from error
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return state


def clean(root: Path, committed: Container[str], newest: int) -> None:
    """Delete what killed processes left under `root`: drafts, discarded folders, and what is not `committed` of the
    versions up to the one after the `newest`. (Later ones are of a database that is gone, and stay.) `committed` are
    names of folders: a data folder that was moved is still the same one.

    Only its one writer calls this.
    """
    for folder in root.glob(".v*"):
        shutil.rmtree(folder, ignore_errors=True)
    found = [(folder, _VERSION.fullmatch(folder.name)) for folder in root.glob("v*")]
    left = [folder for folder, name in found if name and int(name[1]) <= newest + 1 and folder.name not in committed]
    delete_checkpoints(root, left)


def delete_checkpoints(root: Path, folders: list[Path]) -> None:
    """Delete those of `folders` that lie directly under `root`; a policy folder from elsewhere is never touched."""
    for folder in folders:
        if folder.parent == root and folder.is_dir():
            _discard(folder)


def _place(draft: Path, root: Path, name: str) -> Path:
    """Rename `draft` to the first of `name`, `name`.2, … that is free: a rename onto a folder with files fails."""
    for number in itertools.count(1):
        final = root / (name if number == 1 else f"{name}.{number}")
        try:
            return draft.rename(final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    raise AssertionError("unreachable")


def _discard(folder: Path) -> None:
    # Renamed first, so that a kill half-way through the deletion never leaves a broken folder under a good name.
    doomed = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _sync(path: Path) -> None:
    with _opened(path) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
