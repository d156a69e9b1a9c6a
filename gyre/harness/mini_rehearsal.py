"""What one run of mini-swe-agent looks like, so that a fork-server learns what a run touches (see warm_server.learn).

A stand-alone script under the harness's python: `stage()` serves a scripted model on the loopback interface and gives
the argv and environment of a run against it, in a folder of its own that is gone afterwards.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

_COMMANDS = ["true", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]


class _Model(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        turn = sum(m["role"] == "assistant" for m in body["messages"])
        arguments = json.dumps({"command": _COMMANDS[min(turn, 1)]})
        call = {"id": f"call_{turn}", "type": "function", "function": {"name": "bash", "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        reply = {
            "id": "rehearsal",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def stage() -> tuple[list[str], dict[str, str]]:
    """(argv, environment) of a whole run of two turns; the process's current folder changes."""
    folder = tempfile.mkdtemp(prefix="gyre-rehearsal-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.chdir(folder)
    server = HTTPServer(("127.0.0.1", 0), _Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    argv = ["mini", "-m", "openai/rehearsal", "-c", "mini.yaml", "-c", "model.model_kwargs.timeout=300"]
    argv += ["-t", "rehearsal", "-y", "--exit-immediately", "-o", f"{folder}/trajectory.json"]
    env = {**os.environ, "HOME": folder, "OPENAI_API_BASE": url, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "x"}
    return argv, env
