"""What a stack would tell a worker of a run, where a test or a benchmark starts it without a stack."""

from __future__ import annotations

from pathlib import Path

from gyre.config import RunConfig
from gyre.ports import LOOPBACK
from workers.settings import WorkerSettings

NOBODY = "127.0.0.1:9"
"""An address where nothing listens."""


def worker_settings(
    run: RunConfig, database: str, data: Path, *, temporal: str = NOBODY, gateway: str = f"http://{NOBODY}",
    host: str = LOOPBACK,
) -> WorkerSettings:  # fmt: skip
    """Settings of a worker of `run`, which is written to a file in the folder `data`. `database` is an SQLAlchemy URL;
    who needs neither Temporal nor a gateway gets an address without one."""
    config = data / "run.json"
    config.write_text(run.model_dump_json(), encoding="utf-8")
    return WorkerSettings(
        database_url=database, temporal_address=temporal, gateway_url=gateway, data=data, run_config=config, host=host
    )
