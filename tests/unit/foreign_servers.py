"""A run whose files name servers of somebody else, and a server that records who connects to it."""

from __future__ import annotations

import json
import random
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray_ulysses.config.yaml_text import dump_yaml, read_yaml
from ray_ulysses.data.fingerprint import stable_hash

SECRETS = {
    "AWS_ACCESS_KEY_ID": "canary-aws-id",
    "AWS_SECRET_ACCESS_KEY": "canary-aws-secret",
    "AWS_SESSION_TOKEN": "canary-aws-session",
    "AZURE_STORAGE_ACCOUNT_KEY": "Y2FuYXJ5LWF6dXJl",
    "HF_TOKEN": "canary-hf",
    "MLFLOW_TRACKING_TOKEN": "canary-mlflow",
}
ENVIRONMENT = {**SECRETS, "AWS_REGION": "us-east-1", "AWS_METADATA_ENDPOINT": "http://127.0.0.1:9"}
STEERING = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "MLFLOW_TRACKING_URI", "HF_ENDPOINT", "HTTP_PROXY")
"""Variables that say where requests go."""


@dataclass(kw_only=True)
class Listener:
    """A server that answers every request with an error."""

    port: int
    received: list[bytes] = field(default_factory=list)
    """The beginning of what each connection sent."""


@contextmanager
def listening() -> Iterator[Listener]:
    """Run a listener on a free port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(60.0)
            listener.received.append(self.request.recv(65536))
            self.request.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        listener = Listener(port=server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield listener
        finally:
            server.shutdown()
            thread.join(10.0)


def stores(address: str) -> list[str]:
    """Return locations of object stores at an address, in every form that names it."""
    return [
        f"s3://bucket/runs?endpoint_override={address}&scheme=http",
        f"s3://bucket?endpoint_override=http://{address}&scheme=http&region=us-east-1",
        f"s3a://bucket/runs?endpoint_override={address}",
        f"s3://bucket/runs?endpoint_override=http://{address}/path",
        f"gs://bucket/runs?endpoint_override={address}&scheme=http",
        f"gcs://bucket?endpoint_override=https://{address}",
        f"abfs://container@account/runs?blob_storage_authority={address}&enable_tls=false",
        f"az://container/runs?account_name=account&blob_storage_authority={address}",
    ]


class ForeignRun:
    """A run's directory, the files of which a case replaces."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._plan = next(folder.glob("plan/segment-*/plan.json"))
        self._files = {path: path.read_bytes() for path in (folder / "config.yaml", self._plan)}

    def restore(self) -> None:
        """Put the files back that a case has replaced."""
        for path, content in self._files.items():
            path.write_bytes(content)
        for name in ("tracking.json", "resumed-from.json", "secrets.env"):
            (self.folder / name).unlink(missing_ok=True)

    def set(self, path: str, value: object) -> None:
        """Change a setting of its configuration."""
        section, _, name = path.partition(".")
        tree: Any = read_yaml(self.folder / "config.yaml")[0]
        tree[section][name] = value
        (self.folder / "config.yaml").write_text(dump_yaml(tree))

    def move_corpus(self, path: str) -> None:
        """Let its plan, whose checksum is right, find the corpus elsewhere."""
        fields = json.loads(self._plan.read_text())
        del fields["checksum"]
        for source in fields["sources"]:
            source["path"] = path
        self._plan.write_text(json.dumps({**fields, "checksum": stable_hash(fields)}))

    def track(self, uri: str, **changes: Any) -> None:
        """Let it name an MLflow run."""
        fields = {"uri": uri, "experiment": "e", "key": "k" * 32, "run_id": "0" * 32, "experiment_id": "0", **changes}
        (self.folder / "tracking.json").write_text(json.dumps(fields))

    def hide_secrets(self, text: str) -> None:
        """Give it a file of secrets of its own."""
        file = self.folder / "secrets.env"
        file.touch(mode=0o600)
        file.write_text(text)
        self.set("cluster.secrets_file", str(file))


def mutations(run: ForeignRun, port: int, canary: Path) -> dict[str, Callable[[random.Random], Any]]:
    """Return what a case may do to a run, by name: each makes one of its files name the listener."""

    def address(drawn: random.Random) -> str:
        return drawn.choice([f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}"])

    def url(drawn: random.Random) -> str:
        return f"{drawn.choice(['http', 'https'])}://{address(drawn)}"

    def store(drawn: random.Random) -> str:
        return drawn.choice(stores(address(drawn)))

    def secrets(drawn: random.Random) -> str:
        return "".join(f"{name}={url(drawn)}\n" for name in drawn.sample(STEERING, 2))

    def other(drawn: random.Random) -> None:
        text = {"asked": "/other", "location": store(drawn), "step": 4}
        (run.folder / "resumed-from.json").write_text(json.dumps(text))

    return {
        "checkpoint.storage": lambda drawn: run.set("checkpoint.storage", store(drawn)),
        "run.storage": lambda drawn: [run.set("run.storage", store(drawn)), run.set("tracking.uri", url(drawn))],
        "data.path": lambda drawn: run.set("data.path", store(drawn)),
        "plan": lambda drawn: run.move_corpus(store(drawn)),
        "tracking.uri": lambda drawn: run.set("tracking.uri", url(drawn)),
        "tracking.json": lambda drawn: run.track(url(drawn)),
        "database": lambda drawn: run.track(f"sqlite:///{canary}"),
        "scheme": lambda drawn: run.track(
            f"{drawn.choice(['postgresql', 'mysql', 'databricks'])}://{address(drawn)}/a"
        ),
        "model.path": lambda drawn: run.set("model.path", drawn.choice([url(drawn), store(drawn)])),
        "model.resume_from": lambda drawn: run.set("model.resume_from", store(drawn)),
        "resumed-from.json": other,
        "cluster.address": lambda drawn: run.set("cluster.address", address(drawn)),
        "cloud_metadata_url": lambda drawn: run.set("elastic.cloud_metadata_url", url(drawn)),
        "secrets_file": lambda drawn: run.hide_secrets(secrets(drawn)),
    }
