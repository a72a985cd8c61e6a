"""A small Hugging Face hub on this machine, and hubs that are away."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

_COMMIT = "c" * 40
AWAY = "http://127.0.0.1:9"
"""No hub answers at this port."""


@contextmanager
def serve_hub(repositories: Mapping[str, Mapping[str, bytes]], *, status: int = 200) -> Iterator[tuple[str, list[str]]]:
    """Serve repositories, named as in the hub's paths (``owner/name``, ``datasets/owner/name``), of some files.

    With another status than 200, every answer is that.

    Yields:
        The address, and the requests so far.
    """
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            # A library that takes its caller for an AI agent looks up its name first.
            if self.path != "/api/agent-harnesses":
                requests.append(f"{self.command} {self.path}")
            if status != 200:
                self._send(status, b"", {})
                return
            path = self.path.partition("?")[0].lstrip("/")
            name = path.removeprefix("api/").removeprefix("models/")
            repository = next((one for one in repositories if name == one or name.startswith(f"{one}/")), None)
            if repository is None:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
                return
            files, rest = repositories[repository], name.removeprefix(repository).strip("/")
            if path.startswith("api/"):
                if rest.startswith("tree/"):
                    found: object = _entries(files, rest.partition("/")[2].partition("/")[2])
                else:
                    siblings = [{"rfilename": file} for file in files]
                    found = {"id": repository, "sha": _COMMIT, "siblings": siblings, "tags": []}
                self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})
                return
            file = rest.partition("/")[2].partition("/")[2]
            if file not in files:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": _COMMIT})
            else:
                self._send(200, files[file], {"ETag": f'"{_etag(files[file])}"', "X-Repo-Commit": _COMMIT})

        def _send(self, code: int, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _entries(files: Mapping[str, bytes], folder: str) -> list[dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for path, data in files.items():
        below = path.removeprefix(f"{folder}/" if folder else "")
        if (folder and below == path) or not below:
            continue
        name, is_deeper, _ = below.partition("/")
        place = f"{folder}/{name}".lstrip("/")
        size = {} if is_deeper else {"size": len(data)}
        found[place] = {"type": "directory" if is_deeper else "file", "path": place, "oid": _etag(data), **size}
    return list(found.values())


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def use_hub(address: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a hub the one that this process asks, with a cache of its own."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address)


def refuse_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test in which the hub's library waits before it tries again."""

    def wait(seconds: float) -> None:
        raise AssertionError(f"a library waits {seconds} s before it asks the hub again")

    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", wait)
