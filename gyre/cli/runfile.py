"""A run file as the commands take it that start its processes."""

from __future__ import annotations

from pathlib import Path

from gyre.cli.errors import CliError
from gyre.config import ConfigError, RunConfig, load_run_config
from gyre.training.hf_config import UnsupportedModelError, check_layout, read_shape


def read_run_file(path: Path, **overrides: object) -> RunConfig:
    """`load_run_config`, and whether the policy can be split as each cell's layout says: before anything starts.

    Raises CliError with exit code 2.
    """
    try:
        run = load_run_config(path, **overrides)
    except ConfigError as error:
        raise CliError(str(error), code=2) from error
    for cell in run.cells:
        if cell.layout.ranks > 1:
            try:
                check_layout(read_shape(run.policy.path), cell.layout.tensor_parallel, cell.layout.pipeline_parallel)
            except UnsupportedModelError as error:
                raise CliError(f"{path}: cell {cell.name}: {error}", code=2) from error
    return run
