"""Control of one SGLang server over HTTP: health, pausing, memory, weights. Generation is the gateway's own client."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import httpx
import torch

from gyre.transfer.base import Layout

PauseMode = Literal["abort", "retract", "in_place"]

KEEP_ALIVE_S = 2.0
"""Idle connections are dropped after so long: the server drops them after 5 s, and a request that it crosses fails."""

_MEMORY_TAGS = ["weights", "kv_cache"]


class EngineError(RuntimeError):
    """The server refused a request or did not answer; the message names the route and what it said."""


class EngineClient:
    """One server's control routes. Every method raises EngineError where the server refuses or is gone."""

    def __init__(self, url: str, timeout_s: float = 60.0) -> None:
        self.url = url
        self.half_updated = False
        """Whether an update of weights has begun and did not end well: what the server holds is undefined."""
        limits = httpx.Limits(keepalive_expiry=KEEP_ALIVE_S)
        self._http = httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _call(
        self, method: str, route: str, body: dict[str, Any] | None = None, *, repeatable: bool = False
    ) -> httpx.Response:
        """`repeatable`: the request may arrive twice, so a connection that breaks is tried once more."""
        for last in (not repeatable, True):
            try:
                response = await self._http.request(method, route, json=body)
                break
            except httpx.TransportError as error:
                if last or not isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError):
                    raise EngineError(f"{self.url}{route}: no answer ({type(error).__name__}: {error})") from error
        if response.status_code >= 400:
            raise EngineError(f"{self.url}{route}: HTTP {response.status_code}: {response.text[:500]}")
        return response

    async def _get(self, route: str) -> httpx.Response:
        return await self._call("GET", route, repeatable=True)

    async def _post(
        self, route: str, body: dict[str, Any] | None = None, *, repeatable: bool = False
    ) -> dict[str, Any]:
        response = await self._call("POST", route, body or {}, repeatable=repeatable)
        answer = response.json() if response.headers.get("content-type", "").startswith("application/json") else {}
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{self.url}{route}: {answer.get('message', 'refused')}")
        return answer if isinstance(answer, dict) else {}

    async def health(self) -> bool:
        """Whether the server answers."""
        try:
            await self._get("/health")
        except EngineError:
            return False
        return True

    async def server_info(self) -> dict[str, Any]:
        """The server's arguments and internal state, as SGLang reports them."""
        info: dict[str, Any] = (await self._get("/server_info")).json()
        return info

    async def weight_version(self) -> int:
        """The policy version that the server says it serves."""
        return int((await self._get("/model_info")).json()["weight_version"])

    async def running_requests(self) -> int:
        """Requests in the server: running and waiting."""
        loads = (await self._get("/v1/loads")).json()["loads"]
        return sum(int(rank["num_running_reqs"]) + int(rank["num_waiting_reqs"]) for rank in loads)

    async def wait_empty(self, timeout_s: float, poll_s: float = 0.02) -> bool:
        """Wait until the server holds no request; False when `timeout_s` seconds passed and it still does."""
        deadline = time.monotonic() + timeout_s
        while await self.running_requests() > 0:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(poll_s)
        return True

    async def abort_all(self) -> None:
        """End every request with finish reason `abort`; their clients get the tokens so far."""
        await self._post("/abort_request", {"rid": "", "abort_all": True}, repeatable=True)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. `retract`: requests lose their KV and wait; `in_place`: they keep it; `abort`: they end."""
        await self._post("/pause_generation", {"mode": mode}, repeatable=True)

    async def resume(self) -> None:
        """Go on generating after `pause`."""
        await self._post("/continue_generation", repeatable=True)

    async def release_memory(self) -> None:
        """Free the memory of weights and KV cache. The server must hold no request. (A no-op on CPU.)"""
        await self._post("/release_memory_occupation", {"tags": _MEMORY_TAGS})

    async def resume_memory(self) -> None:
        """Take back what `release_memory` freed; weights and KV are then undefined and must be loaded and flushed."""
        await self._post("/resume_memory_occupation", {"tags": _MEMORY_TAGS})

    async def flush_cache(self, wait_s: float = 0.0) -> None:
        """Forget all cached prefixes. The server must run nothing, or end what it runs within `wait_s` seconds."""
        await self._post(f"/flush_cache?timeout={wait_s:g}" if wait_s else "/flush_cache", repeatable=True)

    async def settle(self) -> None:
        """Once, when it has started: let Python's collector leave alone what lives by now. A server that still runs
        something is waited for.

        On CPU SGLang collects garbage at each flush, so at each change of weights and of roles; walking all objects of
        its imports takes a fraction of a second, in which nothing is generated.
        """
        await self.flush_cache(wait_s=30.0)  # what is garbage by now would be kept, too
        await self._post("/freeze_gc", repeatable=True)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Retract in-flight requests for the length of the block: afterwards they are prefilled anew, and go on.

        That is the mode for weight updates: no request ends, none attends to keys and values of older weights, and
        SGLang reports for each the spans of tokens by version. (`in_place` would keep such keys and values, and the
        prefix cache cannot be flushed under it.) A block that fails leaves the server paused: with weights that may be
        half of each version nothing must be computed, least of all keys and values that other cells could find.
        `half_updated` is set from the first order until the last has been obeyed.
        """
        self.half_updated = True
        await self.pause("retract")
        yield
        await self.resume()
        self.half_updated = False

    async def update_weights(self, tensors: dict[str, torch.Tensor], version: int, *, idle: bool = False) -> bool:
        """Replace the weights while requests are in flight; they go on under `version` from their next token.

        `tensors`: Hugging Face names and layout. They are copied into shared memory once, and from there by the server.
        `idle`: only if the server holds no request; False: it holds one, and nothing was changed.
        If this fails and `half_updated` is set, the server's weights are undefined, and it stays paused: start it anew.
        """
        payload, shared = await asyncio.to_thread(_share, tensors)
        async with self.paused():
            if idle and await self.running_requests() > 0:
                return False
            await self._post("/begin_weight_update", {"selector": "all"})
            await self._post(
                "/update_weights_from_tensor",
                {"serialized_named_tensors": [payload], "flush_cache": True, "weight_version": str(version)},
            )
            await self._post("/end_weight_update")
        del shared
        return True

    async def update_weights_from_disk(self, checkpoint: Path, version: int, *, idle: bool = False) -> bool:
        """As `update_weights`, from a Hugging Face folder."""
        async with self.paused():
            if idle and await self.running_requests() > 0:
                return False
            await self._post(
                "/update_weights_from_disk",
                {"model_path": str(checkpoint), "flush_cache": True, "weight_version": str(version)},
            )
        return True


def warm_up() -> None:
    """Have torch start what the first weights of a process need to be shared, before a change of role waits for it."""
    _share({"nothing": torch.zeros(1)})


def _share(tensors: dict[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    """The tensors as SGLang's `MultiprocessingSerializer` writes them, without importing SGLang (10 CPU-seconds).

    They are copied into one piece of shared memory, which lives as long as the tensor returned beside the payload:
    sharing a tensor moves its storage, and the caller's may be registered with a transfer engine.
    """
    # The default strategy sends file descriptors, which only a child can receive: SGLang dies of such a payload.
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    layout = Layout.of(tensors)
    shared: torch.Tensor = torch.empty(layout.nbytes, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    views = layout.views(shared)
    with torch.no_grad():
        for name, tensor in tensors.items():
            views[name].copy_(tensor)
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(list(views.items()))
    return base64.b64encode(buffer.getvalue()).decode("ascii"), shared
