"""`python -m workers.stack.prepare`: brings Postgres' tables and Temporal's search attributes up to date.

Idempotent: a second time it finds nothing to do. With `--run-file RUN.toml` it also writes the resolved run to
GYRE_RUN_CONFIG, which the workers read (compose.yaml; `gyre train` does that itself).
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import Client

from gyre.config import ConfigError, load_run_config
from gyre.store import migrate, server
from workers.settings import fail
from workers.stack.services import make_folders
from workflows.attributes import ALL


async def register_attributes(address: str, namespace: str) -> list[str]:
    """Register the search attributes that the namespace lacks and return their names.

    Raises RuntimeError where one is there with another type, which Temporal cannot change.
    """
    client = await Client.connect(address, namespace=namespace)
    known = await client.operator_service.list_search_attributes(ListSearchAttributesRequest(namespace=namespace))
    missing = {}
    for key in ALL:
        wanted = int(key.indexed_value_type)
        have = known.custom_attributes.get(key.name)
        if have is None:
            missing[key.name] = IndexedValueType.ValueType(wanted)
        elif have != wanted:
            raise RuntimeError(
                f"search attribute {key.name}: registered as {IndexedValueType.Name(have)}, needed as"
                f" {IndexedValueType.Name(IndexedValueType.ValueType(wanted))}; use another data folder"
            )
    if missing:
        request = AddSearchAttributesRequest(namespace=namespace, search_attributes=missing)
        await client.operator_service.add_search_attributes(request)
    return sorted(missing)


def main() -> None:
    """Entry point; needs the GYRE_ variables."""
    parser = argparse.ArgumentParser(prog="python -m workers.stack.prepare", description=__doc__)
    parser.add_argument("--run-file", type=Path)
    make_folders(Path(os.environ["GYRE_DATA"]))
    if (run_file := parser.parse_args().run_file) is not None:
        try:
            run = load_run_config(run_file)
        except ConfigError as error:
            fail(str(error))
        path = Path(os.environ["GYRE_RUN_CONFIG"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(run.model_dump_json(indent=1), encoding="utf-8")
    url = os.environ["GYRE_DATABASE_URL"]
    server.wait_ready(url)
    try:
        migrate.upgrade(url)
    except migrate.OtherTables as error:
        fail(str(error))
    try:
        added = asyncio.run(
            register_attributes(os.environ["GYRE_TEMPORAL_ADDRESS"], os.environ["GYRE_TEMPORAL_NAMESPACE"])
        )
    except RuntimeError as error:
        fail(str(error))
    print(f"database at head; search attributes added: {', '.join(added) or 'none'}", flush=True)
    # Threads of Temporal's client may still log while the interpreter ends, which aborts it.
    os._exit(0)


if __name__ == "__main__":
    main()
