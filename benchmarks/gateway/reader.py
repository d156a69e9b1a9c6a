"""`python -m benchmarks.gateway.reader PORT`: what it costs to receive and parse a request, and nothing more."""

from __future__ import annotations

import sys

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


async def read(request: Request) -> Response:
    orjson.loads(await request.body())
    return Response(b"{}")


async def health(_: Request) -> Response:
    return Response(b"{}")


if __name__ == "__main__":
    app = Starlette(routes=[Route("/", read, methods=["POST"]), Route("/health", health)])
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", access_log=False, loop="uvloop")
