"""Local servers: metadata services that answer as the providers' do, and can be made slow, broken or wrong."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeMetadata:
    """Answers of the service; a test changes them while it runs."""

    def __init__(self) -> None:
        # Status and body by path; other paths give 404.
        self.answers: dict[str, tuple[int, str]] = {}
        # The token that AWS would accept; a request for one gets it.
        self.token, self.tokens_given = "token-1", 0
        # Method and path of each request, in order.
        self.asked: list[tuple[str, str]] = []
        self.clock_ahead_s, self.url = 0.0, ""
        # A byte is sent each tenth of a second.
        self.drips = False

    def aws_interrupts(self, in_s: float) -> None:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self.clock_ahead_s + in_s))
        body = json.dumps({"action": "terminate", "time": when})
        self.answers["/latest/meta-data/spot/instance-action"] = (200, body)

    def aws_recommends(self) -> None:
        body = '{"noticeTime": "2026-01-01T00:00:00Z"}'
        self.answers["/latest/meta-data/events/recommendations/rebalance"] = (200, body)

    def gcp(self, preempted: str = "FALSE", maintenance: str = "NONE") -> None:
        self.answers["/computeMetadata/v1/instance/preempted"] = (200, preempted)
        self.answers["/computeMetadata/v1/instance/maintenance-event"] = (200, maintenance)

    def azure(self, *events: dict[str, Any], name: str = "gpu_3") -> None:
        self.answers["/metadata/instance/compute/name"] = (200, name)
        self.answers["/metadata/scheduledevents"] = (200, json.dumps({"DocumentIncarnation": 1, "Events": events}))

    def azure_event(self, kind: str, in_s: float = 30.0, **fields: Any) -> dict[str, Any]:
        when = formatdate(time.time() + self.clock_ahead_s + in_s, usegmt=True)
        event = {"EventType": kind, "EventStatus": "Scheduled", "Resources": ["gpu_3"], "NotBefore": when}
        return event | fields


class QuietHandler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None: ...


class _Handler(QuietHandler):
    fake: FakeMetadata

    def do_GET(self) -> None:
        path, fake = self.path.partition("?")[0], self.fake
        fake.asked.append(("GET", path))
        flavors = {
            "/latest/": ("X-aws-ec2-metadata-token", fake.token, 401),
            "/computeMetadata/": ("Metadata-Flavor", "Google", 403),
            "/metadata/": ("Metadata", "true", 400),
        }
        for prefix, (header, value, refusal) in flavors.items():
            if path.startswith(prefix) and self.headers.get(header) != value:
                return self._answer(refusal, "")
        if path.startswith("/metadata/") and "api-version=" not in self.path:
            return self._answer(400, "")
        return self._answer(*fake.answers.get(path, (404, "not found")))

    def do_PUT(self) -> None:
        self.fake.asked.append(("PUT", self.path))
        if self.path != "/latest/api/token" or not self.headers.get("X-aws-ec2-metadata-token-ttl-seconds"):
            return self._answer(400, "")
        self.fake.tokens_given += 1
        return self._answer(*self.fake.answers.get(self.path, (200, self.fake.token)))

    def _answer(self, status: int, body: str) -> None:
        self.send_response_only(status)
        self.send_header("Date", formatdate(time.time() + self.fake.clock_ahead_s, usegmt=True))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for byte in body.encode() if self.fake.drips else ():
            self.wfile.write(bytes([byte]))
            self.wfile.flush()
            time.sleep(0.1)
        if not self.fake.drips:
            self.wfile.write(body.encode())


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], host: str = "127.0.0.1") -> Iterator[str]:
    """Serve at an address of this machine, and yield the URL."""
    server = ThreadingHTTPServer((host, 0), handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that gave up
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10.0)


@contextmanager
def fake_metadata() -> Iterator[FakeMetadata]:
    fake = FakeMetadata()
    with serving(type("Handler", (_Handler,), {"fake": fake})) as fake.url:
        yield fake
