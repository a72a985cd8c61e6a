"""The little of a Weights & Biases server that its client needs to begin a run; it can stop to answer."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_ENTITY = {"id": "entity", "name": "entity"}
_BUCKET = {
    "id": "bucket", "name": "abc123", "displayName": "demo", "config": "{}", "historyLineCount": 0, "sweepName": None,
    "project": {"id": "project", "name": "tests", "entity": _ENTITY},
}  # fmt: skip
_DATA = {
    "viewer": {"id": "user", "entity": "entity", "username": "user", "flags": "{}", "teams": {"edges": []}},
    "serverInfo": {"cliVersionInfo": {}, "latestLocalVersionInfo": None, "features": []},
    "upsertBucket": {"bucket": _BUCKET, "inserted": True},
    "model": {"name": "tests", "entity": _ENTITY, "bucket": None},
    "createRunFiles": {"runID": "bucket", "uploadHeaders": [], "files": []},
    **{name: {"fields": []} for name in ("QueryType", "MutationType", "ServerInfoType")},
}


@dataclass(kw_only=True)
class WandbServer:
    """A server that runs."""

    port: int = 0
    is_away: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)


@contextlib.contextmanager
def serve_wandb() -> Iterator[WandbServer]:
    """Run a server that answers every query with the same."""
    server = WandbServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if server.is_away.is_set():
                server.ended.wait()
                self.close_connection = True
                return
            content = json.dumps({"data": _DATA}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = answer

        def log_message(self, *arguments: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        listener.daemon_threads, listener.block_on_close = True, False
        server.port = listener.server_address[1]
        threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield server
        finally:
            server.ended.set()
            listener.shutdown()
