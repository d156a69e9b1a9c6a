"""The gateway process: `python -m workers.gateway [--index I]`, bound to the host and port of GYRE_GATEWAY_URL.

Where that holds several URLs, each is a process of its own: number I takes the one with this number, from 0 on.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
from urllib.parse import urlsplit

import uvicorn

from gyre.gateway.app import create_app
from gyre.gateway.sharding import Shard
from gyre.harness.registry import dialect_of
from workers.settings import fail, settings_or_exit

# Of glibc's malloc.h. Requests and prompts of long rollouts are megabytes, and each is a little longer than the last:
# by default every one of them is mapped, faulted in page by page, and unmapped again.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_FREE_BYTES, _LARGEST_ON_HEAP = 256 << 20, 32 << 20


def main() -> None:
    """Serve until a signal; calls that still run then are recorded as incomplete."""
    parser = argparse.ArgumentParser(prog="python -m workers.gateway")
    parser.add_argument("--index", type=int, default=0, help="number of this process")
    index: int = parser.parse_args().index
    settings = settings_or_exit()
    urls = settings.gateway_urls
    if not 0 <= index < len(urls):
        fail(f"--index {index}: GYRE_GATEWAY_URL names {len(urls)} gateway processes, from 0 on")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    url = urlsplit(urls[index])
    app = create_app(settings.run, settings.database_url, dialect_of(settings.run.harness), shard=Shard(index, urls))
    _keep_freed_memory()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts come one by one: another thread is only a detour
    gc.freeze()  # what is imported by now stays: no collection need look through it again
    uvicorn.run(
        app,
        host=url.hostname or "127.0.0.1",
        port=url.port or 80,
        log_level="warning",
        access_log=False,
        loop="uvloop",
        timeout_graceful_shutdown=2,
        timeout_keep_alive=75,
        backlog=2048,
    )


def _keep_freed_memory() -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # no other C library than glibc has it
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
        libc.mallopt(_TRIM_THRESHOLD, _KEPT_FREE_BYTES)


if __name__ == "__main__":
    main()
