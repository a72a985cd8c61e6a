"""A small Hugging Face hub on this machine, and hubs that are away."""

from __future__ import annotations

import base64
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
def serve_hub(
    repositories: Mapping[str, Mapping[str, bytes]],
    *,
    status: int = 200,
    pushed: dict[str, dict[str, bytes]] | None = None,
    token: str = "",
) -> Iterator[tuple[str, list[str]]]:
    """Serve repositories, named as in the hub's paths (``owner/name``, ``datasets/owner/name``), of some files.

    With another status than 200, every answer is that. Models can be created and committed to in ``pushed``, with the
    token.

    Yields:
        The address, and the requests so far.
    """
    requests: list[str] = []
    large: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(f"{self.command} {self.path}")
            body = self.rfile.read(int(self.headers["Content-Length"]))
            code, answer = (status, {}) if status != 200 else (401, {})
            if status == 200 and self.headers["Authorization"] == f"Bearer {token}" and pushed is not None:
                code, answer = _written(self.path, body, pushed, large, f"http://{self.headers['Host']}")
            self._send(code, json.dumps(answer).encode(), {"Content-Type": "application/json"})

        def do_PUT(self) -> None:
            requests.append(f"{self.command} {self.path}")
            large[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
            self._send(200, b"", {})

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
            known = {**repositories, **(pushed or {})}
            repository = next((one for one in known if name == one or name.startswith(f"{one}/")), None)
            if repository is None:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
                return
            files, rest = known[repository], name.removeprefix(repository).strip("/")
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
            if self.command != "HEAD":
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


def _written(
    path: str, body: bytes, pushed: dict[str, dict[str, bytes]], large: Mapping[str, bytes], address: str
) -> tuple[int, object]:
    """Return the answer to a request that writes."""
    lines = [json.loads(line) for line in body.splitlines()]
    fields = lines[0]
    if path == "/api/validate-yaml":
        return 200, {"errors": [], "warnings": []}
    if path == "/api/repos/create":
        name = f"{fields['organization']}/{fields['name']}"
        if name in pushed:
            return 409, {"error": "exists", "url": f"{address}/{name}"}
        pushed[name] = {".visibility": fields["visibility"].encode()}
        return 200, {"url": f"{address}/{name}"}
    if path.endswith("/info/lfs/objects/batch"):
        objects = [
            {**one, "actions": {"upload": {"href": f"{address}/large/{one['oid']}"}}} for one in fields["objects"]
        ]
        return 200, {"objects": objects, "transfer": "basic"}
    name, _, verb = path.removeprefix("/api/models/").rpartition("/")[0].rpartition("/")
    if verb == "preupload":
        modes = {True: "lfs", False: "regular"}
        files = [
            {"path": one["path"], "uploadMode": modes[one["path"].endswith(".safetensors")], "shouldIgnore": False}
            for one in fields["files"]
        ]
        return 200, {"files": files}
    assert verb == "commit", path
    for kind, value in ((line["key"], line["value"]) for line in lines[1:]):
        if kind == "deletedFile":
            del pushed[name][value["path"]]
        else:
            content = large[value["oid"]] if kind == "lfsFile" else base64.b64decode(value["content"])
            pushed[name][value["path"]] = content
    commit = {"commitUrl": f"{address}/{name}/commit/{_COMMIT}", "commitOid": _COMMIT, "success": True}
    return 200, commit


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
