"""An S3 server for tests (moto's, in a process of its own), and a proxy that breaks its answers on demand.

``with serve_s3() as server`` starts it on a free port of the loopback interface and ends it by its process id; it also
ends when whoever started it dies. ``server.environment()`` is what a process needs to find it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.request import Request, urlopen

BUCKET = "bucket"
KEY_ID, SECRET = "test-key-id", "test-secret"

Fault = Literal["503", "429", "507", "403", "409", "drop", "lose-answer", "cut-body", "ignore-condition", "stall"]


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Server:
    """A server that runs."""

    port: int

    def uri(self, prefix: str, port: int | None = None) -> str:
        where = f"127.0.0.1:{self.port if port is None else port}"
        return f"s3://{BUCKET}/{prefix}?endpoint_override={where}&scheme=http&region=us-east-1"

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            # Whatever goes wrong, no test asks a real machine for its role.
            "AWS_METADATA_ENDPOINT": "http://127.0.0.1:9",
        }

    def client(self) -> Any:
        import boto3

        names = ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        keys = ("endpoint_url", "region_name", "aws_access_key_id", "aws_secret_access_key")
        return boto3.client("s3", **{key: self.environment()[name] for key, name in zip(keys, names, strict=True)})

    def require_credentials(self, required: bool) -> None:
        count = b"0" if required else b"inf"
        url, headers = f"http://127.0.0.1:{self.port}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        request = Request(url, data=count, headers=headers, method="POST")
        with urlopen(request, timeout=10) as answer:
            assert answer.status == 200


@contextlib.contextmanager
def serve_s3() -> Iterator[S3Server]:
    command = [sys.executable, "-m", "tests.s3_server"]
    # Its log goes nowhere: a pipe that nobody reads would fill up and stop it.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        server = S3Server(port=int(json.loads(process.stdout.readline())))
        server.client().create_bucket(Bucket=BUCKET)
        yield server
    finally:
        process.stdin.close()
        process.stdout.close()
        process.terminate()
        process.wait(timeout=10)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMessenger:
    """One request that went through the proxy."""

    method: str
    path: str
    range: str | None
    status: int
    sent_bytes: int


@dataclass(kw_only=True)
class FaultyProxy:
    """Forwards to a server, but breaks requests that a fault waits for."""

    target: int
    port: int = 0
    delay_s: float = 0.0
    exchanges: list[RankMessenger] = field(default_factory=list)
    _faults: list[tuple[Fault, Callable[[str, str], bool], int]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, fault: Fault, matches: Callable[[str, str], bool] = lambda m, p: True, times: int = 1) -> None:
        """Break the next requests whose method and path match.

        ``drop`` closes the connection before the server hears of it, ``lose-answer`` after it has done it;
        ``cut-body`` sends half of the answer; ``ignore-condition`` takes If-None-Match away; ``stall`` waits 3 s;
        numbers are answers.
        """
        with self._lock:
            self._faults.append((fault, matches, times))

    def heal(self) -> None:
        with self._lock:
            self._faults.clear()

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for index, (fault, matches, times) in enumerate(self._faults):
                if matches(method, path):
                    if times == 1:
                        del self._faults[index]
                    else:
                        self._faults[index] = (fault, matches, times - 1)
                    return fault
        return None

    def note(self, exchange: RankMessenger) -> None:
        with self._lock:
            self.exchanges.append(exchange)

    def count(self, method: str, path_part: str = "") -> int:
        return sum(exchange.method == method and path_part in exchange.path for exchange in self.exchanges)


@contextlib.contextmanager
def faulty_proxy(server: S3Server, kind: type[ForwardingHandler] | None = None) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(target=server.port)
    handler = type("Handler", (kind or ForwardingHandler,), {"proxy": proxy})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listener:
        listener.daemon_threads = True
        listener.block_on_close = False
        proxy.port = listener.server_address[1]
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            listener.shutdown()
            thread.join(10)


class ForwardingHandler(BaseHTTPRequestHandler):
    """Forwards one connection's requests."""

    protocol_version = "HTTP/1.1"
    proxy: FaultyProxy

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.proxy.take_fault(self.command, self.path)
        time.sleep(self.proxy.delay_s)
        if fault == "stall":
            threading.Event().wait(3.0)
        if fault == "drop":
            return self._drop()
        if fault is not None and fault.isdigit():
            return self._answer(int(fault), {"Content-Type": "application/xml"}, _ERRORS[fault])
        status, headers, content = self._forward(body, keep_condition=fault != "ignore-condition")
        if fault == "lose-answer":
            return self._drop()
        return self._answer(status, headers, content, cut=fault == "cut-body")

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def to_server(self, headers: dict[str, str]) -> dict[str, str]:
        return headers

    def to_client(self, headers: dict[str, str]) -> dict[str, str]:
        return headers

    def _forward(self, body: bytes, *, keep_condition: bool) -> tuple[int, dict[str, str], bytes]:
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        if not keep_condition:
            headers = {name: value for name, value in headers.items() if name.lower() not in _CONDITIONS}
        headers = self.to_server(headers)
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.target, timeout=20)
        try:
            connection.request(self.command, self.path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, self.to_client(dict(answer.getheaders())), answer.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: dict[str, str], content: bytes, *, cut: bool = False) -> None:
        left_out = {"connection", "transfer-encoding", "date", "server"}
        sent = content[: len(content) // 2] if cut else content
        # First the note: who has the answer may ask for the count at once.
        self._note(status, len(sent))
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in left_out and not (name.lower() == "content-length" and self.command != "HEAD"):
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            # Whoever asked may be gone, for one after a stall.
            with contextlib.suppress(OSError):
                self.wfile.write(sent)
                self.wfile.flush()
        if cut:
            self._hang_up()

    def _drop(self) -> None:
        self._note(0, 0)
        self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(2)

    def _note(self, status: int, sent_bytes: int) -> None:
        self.proxy.note(
            RankMessenger(
                method=self.command,
                path=self.path,
                range=self.headers.get("Range"),
                status=status,
                sent_bytes=sent_bytes,
            )
        )


_CONDITIONS = {"if-none-match", "x-goog-if-generation-match"}
_CODES = {
    "503": "SlowDown",
    "429": "TooManyRequests",
    "507": "XMinioStorageFull",
    "403": "AccessDenied",
    "409": "ConditionalRequestConflict",
}
_ERRORS = {
    status: f"<Error><Code>{code}</Code><Message>by the proxy</Message></Error>".encode()
    for status, code in _CODES.items()
}


def _main() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application = DomainDispatcherApplication(create_backend_app)
    one_at_a_time = threading.Lock()

    def serve(environ: Any, start_response: Any) -> Any:
        if "HTTP_IF_NONE_MATCH" not in environ:
            return application(environ, start_response)
        # moto 5 looks whether the key is taken, and only then takes it: of two at once both may succeed.
        with one_at_a_time:
            return application(environ, start_response)

    server = make_server("127.0.0.1", 0, serve, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps(server.port), flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    _main()
