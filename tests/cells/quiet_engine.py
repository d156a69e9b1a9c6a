"""`python tests/cells/quiet_engine.py PORT`: stands where SGLang would be, and says that it runs nothing."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Answer(BaseHTTPRequestHandler):
    """The same to every question."""

    def do_GET(self) -> None:
        body = b'{"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}'
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET


if __name__ == "__main__":
    HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
