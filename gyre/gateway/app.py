"""The gateway's HTTP application: routes, whose call it is, and the delivery of answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import orjson
import psycopg
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gyre.config import RunConfig
from gyre.gateway import anthropic_messages, openai_chat, openai_responses
from gyre.gateway.calls import Calls, LiveCall
from gyre.gateway.conversation import plan_aside
from gyre.gateway.dialect import PLAIN, Dialect
from gyre.gateway.errors import GatewayError
from gyre.gateway.messages import DEEPEST, Request, too_deep
from gyre.gateway.metrics import Metrics
from gyre.gateway.policy import Policy
from gyre.gateway.recorder import Recorder, first_line
from gyre.gateway.result import Result
from gyre.gateway.routing import Router
from gyre.gateway.sharding import ALONE, Shard
from gyre.gateway.wire import WireFormat
from gyre.store.db import driver_url
from gyre.store.gateway_queries import cell_notices, cells_of_run

log = logging.getLogger(__name__)

MAX_BODY = 64 * 1024 * 1024
# Seconds before the first sign of life on a stream, and between two: well under any harness's patience.
PING_S = 10.0
CELLS_POLL_S = 1.0
SWEEP_S = 1.0
PAUSE_S = 0.5


class Delivery(Response):
    """Waits for a call's result and hands it over, whole or as a stream; notices a client that leaves.

    A stream's events go out in one burst when the answer is recorded: until then a retry can still join, and a harness
    never holds half an answer. Comments keep the connection alive meanwhile.
    """

    def __init__(self, call: LiveCall, wire: WireFormat, model: str, request: Request) -> None:
        super().__init__()
        self._call, self._wire, self._model = call, wire, model
        self._request, self._stream = request, request.stream
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
        gone = asyncio.create_task(_disconnect(receive))
        try:
            if not await self._wait(gone, send):
                self._call.detach()
                return
            await self._send(send)
            self._call.delivered()
        except asyncio.CancelledError:  # the server ends, and waits for this connection no longer
            self._call.detach()
            if not self._begun:
                body = self._wire.error_body(GatewayError("unavailable", "The gateway is being restarted; try again."))
                await _start(send, 503, "application/json", len(body))
                await send({"type": "http.response.body", "body": body})
        except OSError:  # the transport is closed; a retry gets the answer
            self._call.detach()
        finally:
            gone.cancel()

    async def _wait(self, gone: asyncio.Task[None], send: Send) -> bool:
        """Until the result is there (True), or the client left (False)."""
        while not self._call.task.done():
            timeout = PING_S if self._stream else None
            await asyncio.wait({self._call.task, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not self._call.task.done():
                return False
            if self._stream and not self._call.task.done():
                if not self._begun:
                    await _start(send, 200, "text/event-stream")
                    self._begun = True
                await send({"type": "http.response.body", "body": self._wire.PING, "more_body": True})
        return not gone.done()

    async def _send(self, send: Send) -> None:
        try:
            result = _result(self._call)
        except GatewayError as error:
            if self._begun:
                await send({"type": "http.response.body", "body": self._wire.error_event(error)})
                return
            body = self._wire.error_body(error)
            await _start(send, error.status, "application/json", len(body))
            await send({"type": "http.response.body", "body": body})
            return
        if not self._stream:
            body = self._wire.response(result, self._model, self._request)
            await _start(send, 200, "application/json", len(body))
        else:
            body = b"".join(self._wire.chunks(result, self._model, self._request))
            if not self._begun:
                await _start(send, 200, "text/event-stream")
        await send({"type": "http.response.body", "body": body})


def _result(call: LiveCall) -> Result:
    try:
        return call.task.result()
    except asyncio.CancelledError:
        raise GatewayError("unavailable", "The call was aborted: the rollout or the gateway ends.") from None
    except GatewayError:
        raise
    except Exception as error:
        log.exception("a call failed")
        raise GatewayError("internal", f"The gateway failed: {type(error).__name__}: {error}") from error


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, status: int, media_type: str, length: int | None = None) -> None:
    headers = [(b"content-type", media_type.encode()), (b"cache-control", b"no-cache")]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})


class Gateway:
    """The parts of a running gateway, and its endpoints."""

    def __init__(
        self, run: RunConfig, database_url: str, dialect: Dialect = PLAIN, *, write_patience_s: float = 60.0,
        shard: Shard = ALONE,
    ) -> None:  # fmt: skip
        self.run = run
        self.dialect = dialect
        self.url = database_url
        self.metrics = Metrics()
        # No overflow: opening a connection costs more than waiting for one. No ping before use: what fails because
        # Postgres was restarted is tried again anyway. No transactions, which are two round trips each: what goes this
        # way is one statement, or several that are each whole by themselves.
        self.engine = create_async_engine(
            driver_url(database_url), pool_size=4, max_overflow=0, isolation_level="AUTOCOMMIT"
        )
        self.router = Router(len(shard.urls))
        self.recorder = Recorder(self.engine, self.metrics, write_patience_s)
        self.calls = Calls(
            run.run_id, Policy(run.policy), run.sampling, run.serving, self.router, self.recorder, self.metrics,
            dialect, shard,
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Everything that runs beside the requests."""
        self.recorder.start()
        tasks = [asyncio.create_task(self._watch_cells()), asyncio.create_task(self._sweep())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await self.calls.close()
            await self.recorder.stop()
            await self.engine.dispose()

    async def _watch_cells(self) -> None:
        while True:
            try:
                async for _ in cell_notices(self.url, self.run.run_id, CELLS_POLL_S):
                    self.router.apply(await cells_of_run(self.engine, self.run.run_id))
            except (psycopg.Error, SQLAlchemyError, OSError) as error:
                # The cells stay as they were last seen; an engine that died meanwhile shows by itself.
                log.warning("cannot watch the cells (%s); trying again", first_line(error))
            except Exception:  # whatever it is: without this task no call would ever find a new cell
                log.exception("cannot watch the cells; trying again")
            await asyncio.sleep(PAUSE_S)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.calls.sweep()
            except (SQLAlchemyError, OSError):  # Postgres is away: there is a next time
                continue
            except Exception:
                log.exception("the sweep failed; there is a next one")

    async def chat_completions(self, http: HttpRequest) -> Response:
        """POST /v1/chat/completions."""
        return await self._call(http, openai_chat)

    async def messages(self, http: HttpRequest) -> Response:
        """POST /v1/messages."""
        return await self._call(http, anthropic_messages)

    async def responses(self, http: HttpRequest) -> Response:
        """POST /v1/responses."""
        return await self._call(http, openai_responses)

    async def compact(self, http: HttpRequest) -> Response:
        """POST /v1/responses/compact: a call like any other, that asks for a summary in place of the history."""
        return await self._call(http, openai_responses, openai_responses.parse_compact)

    async def count_tokens(self, http: HttpRequest) -> Response:
        """POST /v1/messages/count_tokens: the length of the very prompt that the same call would get now."""
        try:
            token = _token(http)
            body = await _body(http)
            session = await self.calls.session(token)
            request = self.dialect.normalise(anthropic_messages.parse_count(body, self.run.policy.name))
            hint = self.dialect.hint(http.headers, request)
            planned = await plan_aside(lambda: session.tree, self.calls.policy, request, hint, lambda: session.kinds)
        except GatewayError as error:
            return _error(error, anthropic_messages)
        return Response(anthropic_messages.token_count(planned.prompt_length), media_type="application/json")

    async def hello(self, _: HttpRequest) -> Response:
        """GET and HEAD /api/hello: Claude Code asks whether there is a way to its base URL."""
        return _json({"message": "hello"})

    async def _call(
        self, http: HttpRequest, wire: WireFormat, parse: Callable[[bytes, str], Request] | None = None
    ) -> Response:
        try:
            token = _token(http)
            body = await _body(http)
            session = await self.calls.session(token)
            name = self.run.policy.name
            parsed = wire.parse_request(body, name, session.reading) if parse is None else parse(body, name)
            for name, part in (("tools", parsed.tools), ("the request", parsed.options)):
                if too_deep(part):
                    raise GatewayError("bad_request", f"{name}: nested more than {DEEPEST} levels deep.")
            request = self.dialect.normalise(parsed)
            hint = self.dialect.hint(http.headers, request)
        except GatewayError as error:
            return _error(error, wire)
        except Exception as error:  # else the server would answer in no provider's shape
            log.exception("a request could not be read")
            return _error(GatewayError("internal", f"The gateway failed: {type(error).__name__}: {error}"), wire)
        # Equal bytes at two endpoints are two calls.
        call = self.calls.submit(session, request, body if parse is None else b"compact " + body, hint)
        return Delivery(call, wire, self.run.policy.name, request)

    async def models(self, http: HttpRequest) -> Response:
        """GET /v1/models and /v1/models/<id>, in Anthropic's shape for its clients and else in OpenAI's."""
        name, anthropic = self.run.policy.name, "anthropic-version" in http.headers
        try:
            await self.calls.session(_token(http))
            if (asked := http.path_params.get("model", name)) != name:
                raise GatewayError("unknown_model", f"The model {asked!r} does not exist; use {name!r}.", "model")
        except GatewayError as error:
            return _error(error, anthropic_messages if anthropic else openai_chat)
        if anthropic:
            shape = anthropic_messages.one_model if "model" in http.path_params else anthropic_messages.models
            body = shape(name, self.run.policy.context, self.run.sampling.max_tokens)
            return Response(body, media_type="application/json")
        body = openai_chat.models(name)
        if "model" in http.path_params:
            body = orjson.dumps(orjson.loads(body)["data"][0])
        return Response(body, media_type="application/json")

    async def health(self, _: HttpRequest) -> Response:
        """GET /health."""
        return _json({"status": "ok", "run": self.run.run_id, "waiting": self.router.waiting})

    async def show_metrics(self, _: HttpRequest) -> Response:
        """GET /metrics, for Prometheus."""
        self.metrics.see(self.router.view(), self.router.waiting, len(self.calls.sessions))
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def cells(self, _: HttpRequest) -> Response:
        """GET /admin/cells: where calls go now. Without the engines' URLs: agents reach this port, too."""
        cells = [{k: v for k, v in cell.items() if k != "url"} for cell in self.router.view()]
        return _json({"cells": cells, "waiting": self.router.waiting})


def create_app(
    run: RunConfig, database_url: str, dialect: Dialect = PLAIN, *, write_patience_s: float = 60.0,
    shard: Shard = ALONE,
) -> Starlette:  # fmt: skip
    """The application for one run, whose harness speaks `dialect`.

    `write_patience_s`: how long writes wait for a Postgres that is away. `shard`: this process among several.

    Raises FileNotFoundError where the policy has no tokenizer.
    """
    gateway = Gateway(run, database_url, dialect, write_patience_s=write_patience_s, shard=shard)

    async def not_found(http: HttpRequest, __: Exception) -> Response:
        anthropic = "anthropic-version" in http.headers
        known = "messages" if anthropic else "chat/completions"
        error = GatewayError("not_found", f"Unknown path; use /r/<token>/v1/{known}.")
        return _error(error, anthropic_messages if anthropic else openai_chat)

    routes = [Route("/health", gateway.health), Route("/metrics", gateway.show_metrics)]
    routes.append(Route("/admin/cells", gateway.cells))
    for prefix in ("", "/r/{token}"):
        routes.append(Route(f"{prefix}/v1/chat/completions", gateway.chat_completions, methods=["POST"]))
        routes.append(Route(f"{prefix}/v1/responses", gateway.responses, methods=["POST"]))
        routes.append(Route(f"{prefix}/v1/responses/compact", gateway.compact, methods=["POST"]))
        routes.append(Route(f"{prefix}/v1/messages", gateway.messages, methods=["POST"]))
        routes.append(Route(f"{prefix}/v1/messages/count_tokens", gateway.count_tokens, methods=["POST"]))
        routes.append(Route(f"{prefix}/api/hello", gateway.hello))
        routes.append(Route(f"{prefix}/v1/models", gateway.models))
        routes.append(Route(f"{prefix}/v1/models/{{model}}", gateway.models))
    app = Starlette(routes=routes, lifespan=gateway.lifespan, exception_handlers={404: not_found})
    app.state.gateway = gateway
    return app


def _token(http: HttpRequest) -> str:
    token: str | None = http.path_params.get("token")
    if token is None:
        token = http.headers.get("x-api-key")
    if token is None:
        scheme, _, token = http.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise GatewayError("unauthorized", "Send the rollout's token in the path (/r/<token>/v1) or as API key.")
    return token


async def _body(http: HttpRequest) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in http.stream():
        size += len(part)
        if size > MAX_BODY:
            raise GatewayError("too_large", f"The request is longer than {MAX_BODY} bytes.")
        parts.append(part)
    return b"".join(parts)


def _error(error: GatewayError, wire: WireFormat) -> Response:
    return Response(wire.error_body(error), error.status, media_type="application/json")


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
