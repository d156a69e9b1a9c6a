"""A scripted model on the loopback interface: OpenAI Chat, one `bash` tool call a turn."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
Answer = tuple[int, dict[str, Any]]


class ScriptedModel:
    """Answers turn n of any conversation with `commands[n]`, then submits. `delay_s` is waited before each answer.

    `fault(turn, n_requests)` may give (status, body) instead of the answer; `requests` are the bodies seen.
    """

    def __init__(self, commands: list[str], delay_s: float = 0.0) -> None:
        self.commands = commands
        self.delay_s = delay_s
        self.fault: Callable[[int, int], Answer | None] = lambda turn, n: None
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                owner.requests.append(body)
                owner.paths.append(self.path)
                owner.keys.append(self.headers.get("authorization"))
                status, reply = owner.answer(body)
                data = json.dumps(reply).encode()
                head = f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
                self.wfile.write(head.encode() + data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def answer(self, body: dict[str, Any]) -> Answer:
        turn = sum(m["role"] == "assistant" for m in body["messages"])
        if (fault := self.fault(turn, len(self.requests))) is not None:
            return fault
        time.sleep(self.delay_s)
        command = self.commands[turn] if turn < len(self.commands) else SUBMIT
        call = {
            "id": f"call_{turn}",
            "type": "function",
            "function": {"name": "bash", "arguments": json.dumps({"command": command})},
        }
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return 200, {
            "id": "chatcmpl-x",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10},
        }

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
