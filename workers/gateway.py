"""The gateway process: `python -m workers.gateway`, bound to the host and port of GYRE_GATEWAY_URL."""

from __future__ import annotations

import gc
import logging
from urllib.parse import urlsplit

import uvicorn

from gyre.gateway.app import create_app
from gyre.harness.registry import dialect_of
from workers.settings import settings_or_exit


def main() -> None:
    """Serve until a signal; calls that still run then are recorded as incomplete."""
    settings = settings_or_exit()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    url = urlsplit(settings.gateway_url)
    app = create_app(settings.run, settings.database_url, dialect_of(settings.run.harness))
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


if __name__ == "__main__":
    main()
