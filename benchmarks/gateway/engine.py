"""Stand-ins for engines: each request gets the same answer after the same time. One is like SGLang, one like vLLM."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import orjson
from tokenizers import Tokenizer

REPLY = (
    "<think>\nThe next file is worth a look before anything is changed.\n</think>\n\nLet me look at it.\n"
    '<tool_call>\n{"name": "bash", "arguments": {"command": "sed -n 1,80p src/module.py"}}\n</tool_call><|im_end|>'
)
CHUNK = 16  # tokens, as the gateway asks SGLang for


@dataclass
class Served:
    """When a request had arrived in full, and when the last of its answer was handed to the kernel (perf_counter)."""

    arrived: float
    sent: float = 0.0


class Engine:
    """A server on a free port. `answer(path, length of the body)` gives the pieces of a chunked response."""

    def __init__(self, answer: Callable[[bytes, int], list[bytes]], seconds: float, media_type: bytes) -> None:
        self.answer, self.seconds, self.media_type = answer, seconds, media_type
        self.served: list[Served] = []
        self.url = ""

    async def start(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()


class _Connection(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._buffer = bytearray()
        self._missing = 0
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._missing > len(data):  # the rest of a body, which nobody reads
            self._missing -= len(data)
            return
        self._buffer += data[self._missing :]
        if self._missing:
            self._missing = 0
            self._arrived()
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            self._head = bytes(self._buffer[:end])
            del self._buffer[: end + 4]
            self._length = content_length(self._head)
            if len(self._buffer) < self._length:
                self._missing = self._length - len(self._buffer)
                self._buffer.clear()
                return
            del self._buffer[: self._length]
            self._arrived()

    def _arrived(self) -> None:
        path = self._head.split(b" ", 2)[1]
        if self._head.startswith(b"GET"):
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            return
        served = Served(time.perf_counter())
        asyncio.get_running_loop().call_later(self._engine.seconds, self._send, path, self._length, served)

    def _send(self, path: bytes, length: int, served: Served) -> None:
        pieces = self._engine.answer(path, length)
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: " + self._engine.media_type + b"\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        self._transport.write(head + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n")
        served.sent = time.perf_counter()
        self._engine.served.append(served)


def content_length(head: bytes) -> int:
    """Of a message with this head; 0 where it does not say."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def sglang(tokenizer: Tokenizer, seconds: float) -> Engine:
    """`/generate` as SGLang streams it, with log-probs and versions."""
    ids: list[int] = tokenizer.encode(REPLY, add_special_tokens=False).ids
    starts = [0, 1, *range(1 + CHUNK, len(ids), CHUNK)]
    pieces = []
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        meta = {
            "id": "0" * 32,
            "finish_reason": {"type": "stop", "matched": ids[-1]} if end == len(ids) else None,
            "prompt_tokens": 0,
            "weight_version": "0",
            "weight_versions": [{"version": "0", "start": 0, "end": end}],
            "completion_tokens": end,
            "cached_tokens": 0,
            "output_token_logprobs": [[-0.0123456 * (i % 7), t, None] for i, t in enumerate(ids[start:end], start)],
        }
        event = {"text": "", "output_ids": ids[start:end], "meta_info": meta}
        pieces.append(b"data: " + orjson.dumps(event) + b"\n\n")
    pieces.append(b"data: [DONE]\n\n")
    return Engine(lambda *_: pieces, seconds, b"text/event-stream")


def vllm(tokenizer: Tokenizer, seconds: float) -> Engine:
    """`/v1/chat/completions` as vLLM answers with `return_token_ids` and `logprobs`."""
    ids: list[int] = tokenizer.encode(REPLY, add_special_tokens=False).ids
    call = json.loads(REPLY.partition("<tool_call>")[2].partition("</tool_call>")[0])
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    content = [
        {"token": tokenizer.decode([t]), "logprob": -0.0123456 * (i % 7), "bytes": None, "top_logprobs": []}
        for i, t in enumerate(ids)
    ]
    choice = {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": "Let me look at it.",
            "reasoning_content": "The next file is worth a look before anything is changed.",
            "tool_calls": [{"id": "call_0123456789", "type": "function", "function": function}],
        },
        "logprobs": {"content": content},
        "finish_reason": "tool_calls",
        "stop_reason": None,
        "token_ids": ids,
    }
    head = orjson.dumps({"id": "chatcmpl-0", "object": "chat.completion", "created": 1, "model": "policy"})[:-1]
    tail = b',"choices":' + orjson.dumps([choice]) + b',"usage":{"prompt_tokens":1,"completion_tokens":1}}'

    def answer(_: bytes, length: int) -> list[bytes]:
        prompt = b",".join([b"4321"] * (length // 4))  # about as many tokens as that text has
        return [head + b',"prompt_token_ids":[' + prompt + b"]" + tail]

    return Engine(answer, seconds, b"application/json")
