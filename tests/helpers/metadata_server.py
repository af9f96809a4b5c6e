"""The metadata servers of three clouds, on this machine: what they answer is what their documentation shows."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "a-session-token"


class MetadataServer:
    """A server that has no notice until `announce`; `requests` are the requested paths.

    The first `late_events` questions for scheduled events are answered after half a second.
    """

    def __init__(self, cloud: str) -> None:
        self.cloud, self.ends_at, self.requests, self.late_events = cloud, 0.0, list[str](), 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def _reply(self) -> None:
                outer.requests.append(self.path)
                if outer.late_events and "scheduledevents" in self.path:
                    outer.late_events -= 1
                    time.sleep(0.5)
                code, text = outer.answer(self.command, self.path, dict(self.headers))
                with contextlib.suppress(OSError):  # the client has not waited
                    self.send_response(code)
                    self.send_header("Content-Length", str(len(text.encode())))
                    self.end_headers()
                    self.wfile.write(text.encode())

            do_GET = do_PUT = _reply

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """By which a node finds it, and no other."""
        nobody = "127.0.0.1:9"
        return {
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{self.host if self.cloud == 'EC2' else nobody}",
            "GCE_METADATA_HOST": self.host if self.cloud == "GCE" else nobody,
            "HEADFOLD_AZURE_METADATA": f"http://{self.host if self.cloud == 'Azure' else nobody}",
        }

    def announce(self, seconds: float) -> None:
        self.ends_at = time.time() + seconds

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        headers = {name.lower(): value for name, value in headers.items()}
        path, when = path.partition("?")[0], datetime.fromtimestamp(self.ends_at, UTC)
        if self.cloud == "EC2":
            if path == "/latest/api/token":
                requested = method == "PUT" and "x-aws-ec2-metadata-token-ttl-seconds" in headers
                return (200, TOKEN) if requested else (405, "")
            if headers.get("x-aws-ec2-metadata-token") != TOKEN:
                return 401, ""
            if path == "/latest/meta-data/spot/instance-action" and self.ends_at:
                return 200, json.dumps({"action": "terminate", "time": when.strftime("%Y-%m-%dT%H:%M:%SZ")})
            return 404, ""
        if self.cloud == "GCE":
            if headers.get("metadata-flavor") != "Google":
                return 403, ""
            known = {"preempted": "TRUE" if self.ends_at else "FALSE", "maintenance-event": "NONE"}
            name = path.removeprefix("/computeMetadata/v1/instance/")
            return (200, known[name]) if name in known else (404, "")
        if headers.get("metadata") != "true":
            return 400, ""
        if path == "/metadata/instance/compute/name":
            return 200, "node-7"
        events = [
            {"EventType": "Preempt", "Resources": ["another"], "NotBefore": format_datetime(when, usegmt=True)},
            {"EventType": "Preempt", "Resources": ["node-7"], "NotBefore": format_datetime(when, usegmt=True)},
        ]
        known = {"DocumentIncarnation": 1, "Events": events if self.ends_at else events[:1]}
        return (200, json.dumps(known)) if path == "/metadata/scheduledevents" else (404, "")
