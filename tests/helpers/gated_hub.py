"""A separate hub on the loopback address, with one gated model, one open one, and nothing else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GATED = "meta-llama/Llama-gated"
OPEN = "openai/open"
TOKEN = "hf_" + "s" * 34
"""Token of the account that has accepted the licence."""


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.answer(200)

    def do_GET(self) -> None:
        name = "/".join(self.path.split("/")[3:5])
        if name == OPEN or (name == GATED and self.headers.get("authorization") == f"Bearer {TOKEN}"):
            self.answer(200)
        elif name == GATED:
            self.answer(403, {"X-Error-Code": "GatedRepo"})
        else:
            self.answer(401, {"X-Error-Code": "RepoNotFound"})

    def answer(self, code: int, headers: dict[str, str] | None = None) -> None:
        body = json.dumps({}).encode()
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def gated_hub() -> Iterator[str]:
    """Its address, for HF_ENDPOINT."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
