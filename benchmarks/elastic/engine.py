"""A paced engine: SGLang's routes as Gyre uses them, answers by `answers`, time by `pace`.

python -m benchmarks.elastic.engine --port P --policy FOLDER --data FOLDER --version V
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from aiohttp import web

from benchmarks.elastic.answers import Answers
from benchmarks.elastic.costs import read_costs
from benchmarks.elastic.pace import Batch, Work
from gyre.simulation.model import CostModel

CHUNK = 16
LOGPROB = -0.5
"""Of every token: nothing is computed with it."""


class Request:
    """One `/generate`. `plan` are the ids of its answer from here on."""

    def __init__(self, engine: PacedEngine, body: dict[str, Any]) -> None:
        self.rid = str(body["rid"])
        self.prompt = np.asarray(body["input_ids"], np.int32)
        self.key = str(body.get("extra_key"))
        sampling = body["sampling_params"]
        rest = engine.answers.rest(self.prompt)
        self.plan = rest[: int(sampling["max_new_tokens"])]
        self.ends = "stop" if len(self.plan) == len(rest) else "length"
        every = int(sampling.get("stream_interval", CHUNK))
        due = sorted({1, *range(every, len(self.plan), every), len(self.plan)} - {0})
        self.cached = engine.cache.shared(self.prompt, self.key)
        self.engine = engine
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.sent = 0
        self.spans: list[list[int]] = []
        self.work = Work(due, self.reached, engine.prefill_s(len(self.prompt) - self.cached))

    def reached(self, tokens: int) -> None:
        """So many tokens are there now."""
        self._send(tokens, {"type": self.ends} if tokens == len(self.plan) else None)

    def abort(self) -> None:
        """End it with what it has."""
        tokens = self.engine.batch.tokens(self.work)
        self.engine.batch.remove(self.work)
        self._send(max(tokens, self.sent), {"type": "abort", "message": "aborted"})

    def _send(self, total: int, finish: dict[str, Any] | None) -> None:
        new, version = self.plan[self.sent : total], self.engine.version
        if new and self.spans and self.spans[-1][0] == version:
            self.spans[-1][2] = total
        elif new:
            self.spans.append([version, self.sent, total])
        meta = {
            "id": self.rid,
            "finish_reason": finish,
            "prompt_tokens": len(self.prompt),
            "completion_tokens": total,
            "cached_tokens": self.cached,
            "weight_version": str(version),
            "weight_versions": [{"version": str(v), "start": s, "end": e} for v, s, e in self.spans],
            "output_token_logprobs": [[LOGPROB, token, None] for token in new],
        }
        self.sent = total
        self.events.put_nowait(b"data: " + orjson.dumps({"text": "", "output_ids": new, "meta_info": meta}) + b"\n\n")
        if finish is not None:
            whole = np.concatenate([self.prompt, np.asarray(self.plan[:total], np.int32)])
            self.engine.cache.add(whole, self.key)
            self.engine.requests.pop(self.rid, None)
            self.events.put_nowait(None)


class Cache:
    """Prefixes whose keys and values the engine would still have: the newest `room` tokens of whole sequences."""

    def __init__(self, room: int) -> None:
        self._room, self._held = room, 0
        self._known: OrderedDict[tuple[str, int, int], int] = OrderedDict()

    def add(self, ids: np.ndarray, key: str) -> None:
        """A sequence that ended."""
        self._known[(key, len(ids), hash(ids.tobytes()))] = len(ids)
        self._held += len(ids)
        while self._held > self._room:
            self._held -= self._known.popitem(last=False)[1]

    def shared(self, ids: np.ndarray, key: str) -> int:
        """Tokens at the beginning of `ids` that are there: the longest known sequence that they extend."""
        for size in sorted({n for k, n, _ in self._known if k == key and n < len(ids)}, reverse=True):
            if (key, size, hash(ids[:size].tobytes())) in self._known:
                return size
        return 0

    def clear(self) -> None:
        """Other weights, or the memory is gone."""
        self._known.clear()
        self._held = 0


class PacedEngine:
    """The server's state and its routes."""

    def __init__(self, cost: CostModel, answers: Answers, version: int, kv_tokens: int) -> None:
        self.cost, self.answers, self.version = cost, answers, version
        self.batch, self.cache = Batch(cost), Cache(kv_tokens)
        self.requests: dict[str, Request] = {}
        self.released = False

    def prefill_s(self, tokens: int) -> float:
        """Seconds that so many tokens take."""
        return tokens / self.cost.prefill_tokens_s

    def app(self) -> web.Application:
        """What is served."""
        app = web.Application(client_max_size=1 << 30)
        post = {
            "/generate": self.generate,
            "/abort_request": self.abort_request,
            "/pause_generation": self.pause,
            "/continue_generation": self.go_on,
            "/release_memory_occupation": self.release,
            "/resume_memory_occupation": self.resume,
            "/flush_cache": self.flush,
            "/freeze_gc": self.nothing,
            "/begin_weight_update": self.nothing,
            "/end_weight_update": self.nothing,
            "/update_weights_from_tensor": self.update,
            "/update_weights_from_disk": self.update,
        }
        get = {"/health": self.nothing, "/server_info": self.nothing, "/model_info": self.info, "/v1/loads": self.loads}
        app.add_routes([web.post(path, handler) for path, handler in post.items()])
        app.add_routes([web.get(path, handler) for path, handler in get.items()])
        return app

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """Stream one answer."""
        request = Request(self, orjson.loads(await http.read()))
        self.requests[request.rid] = request
        self.batch.add(request.work)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(http)
            while (event := await request.events.get()) is not None:
                await response.write(event)
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        finally:
            if self.requests.pop(request.rid, None) is not None:  # the client left
                self.batch.remove(request.work)
        return response

    async def abort_request(self, http: web.Request) -> web.Response:
        """One request, or all."""
        body = await http.json()
        mine = list(self.requests.values()) if body.get("abort_all") else [self.requests.get(str(body["rid"]))]
        for request in mine:
            if request is not None:
                request.abort()
        return _ok()

    async def pause(self, http: web.Request) -> web.Response:
        """Time stands still; in mode `abort` everything ends first."""
        if (await http.json())["mode"] == "abort":
            for request in list(self.requests.values()):
                request.abort()
        self.batch.pause()
        return _ok()

    async def go_on(self, _: web.Request) -> web.Response:
        """The opposite of `pause`."""
        self.batch.resume()
        return _ok()

    async def release(self, _: web.Request) -> web.Response:
        """Half of what a change to training takes; the trainer's waking is the other half."""
        self.cache.clear()
        if not self.released:
            await asyncio.sleep(self.cost.to_train_s / 2)
        self.released = True
        return _ok()

    async def resume(self, _: web.Request) -> web.Response:
        """Half of what a change to serving takes; the trainer's going to sleep is the other half."""
        if self.released:
            await asyncio.sleep(self.cost.to_rollout_s / 2)
        self.released = False
        return _ok()

    async def flush(self, _: web.Request) -> web.Response:
        """Forget all prefixes."""
        self.cache.clear()
        return _ok()

    async def update(self, http: web.Request) -> web.Response:
        """Another version. Its time is part of `optimizer_s`, which central takes, and of `to_rollout_s`."""
        for request in self.requests.values():  # what is there was sampled by the version before
            if (tokens := self.batch.tokens(request.work)) > request.sent:
                request.reached(tokens)
        self.version = int((await http.json())["weight_version"])
        self.cache.clear()
        return _ok()

    async def info(self, _: web.Request) -> web.Response:
        """The version."""
        return web.json_response({"weight_version": str(self.version)})

    async def loads(self, _: web.Request) -> web.Response:
        """What runs and what waits."""
        one = {"num_running_reqs": self.batch.running, "num_waiting_reqs": self.batch.waiting}
        return web.json_response({"loads": [one]})

    async def nothing(self, _: web.Request) -> web.Response:
        """What takes no time."""
        return _ok()


def _ok() -> web.Response:
    return web.json_response({"success": True})


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="data folder of the stack: its costs are there")
    parser.add_argument("--version", type=int, required=True)
    parser.add_argument("--kv-tokens", type=int, required=True)
    x = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    engine = PacedEngine(read_costs(x.data), Answers(x.policy), x.version, x.kv_tokens)
    web.run_app(engine.app(), host="127.0.0.1", port=x.port, access_log=None, print=None)


if __name__ == "__main__":
    main()
