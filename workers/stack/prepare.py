"""`python -m workers.stack.prepare`: brings Postgres' tables and Temporal's search attributes up to date.

Idempotent: a second time it finds nothing to do.
"""

from __future__ import annotations

import asyncio
import os

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import Client

from gyre.store import migrate, server
from workers.settings import fail
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
    """Entry point; needs GYRE_DATABASE_URL, GYRE_TEMPORAL_ADDRESS and GYRE_TEMPORAL_NAMESPACE."""
    url = os.environ["GYRE_DATABASE_URL"]
    server.wait_ready(url)
    migrate.upgrade(url)
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
