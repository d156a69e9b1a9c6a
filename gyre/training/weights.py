"""Weights in a folder of Hugging Face's format: safetensors files beside config.json and the tokenizer's files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gyre.training.convert import WeightsError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def read_hf_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint in `folder`, by Hugging Face's name.

    Raises WeightsError where no safetensors file is there or one cannot be read.
    """
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        files = sorted({folder / name for name in index["weight_map"].values()})
    elif (folder / _SINGLE).is_file():
        files = [folder / _SINGLE]
    else:
        raise WeightsError(f"{folder}: neither {_SINGLE} nor {_INDEX}; save the policy in safetensors format")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file}: cannot be read: {error}") from error
    return weights


def write_hf_weights(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write `weights` as one safetensors file into `folder`, which must exist."""
    ready = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights.items()}
    save_file(ready, folder / _SINGLE, metadata={"format": "pt"})


def copy_companions(source: Path, folder: Path) -> None:
    """Copy config.json, tokenizer and template files of the policy at `source`: all its plain files but weights."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix not in {".safetensors", ".bin", ".pt", ".pth"} and file.name != _INDEX:
            shutil.copyfile(file, folder / file.name)


def set_dtype_in_config(folder: Path, dtype: torch.dtype) -> None:
    """Name the dtype of the weights in `folder`/config.json, which engines read it from."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
