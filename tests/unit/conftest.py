"""An S3 server on the loopback interface that all unit tests of one process share."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.s3_server import FaultyProxy, S3Server, faulty_proxy, serve_s3


@pytest.fixture(scope="session")
def running_s3() -> Iterator[S3Server]:
    with serve_s3() as server:
        yield server


@pytest.fixture
def s3(running_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, with this process's environment set for it."""
    for name, value in running_s3.environment().items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    return running_s3


@pytest.fixture
def prefix() -> str:
    """A prefix that no other test uses."""
    return f"run-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultyProxy]:
    with faulty_proxy(s3) as running:
        yield running


_PROBED: dict[str, Any] = {}


@pytest.fixture
def probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe each architecture that a configuration describes only once in this process."""
    from ray_ulysses.run import preflight

    probe = preflight.check_architecture

    def probed(config: Any) -> Any:
        if config.model.config is None:
            return probe(config)
        key = "".join(getattr(config, name).model_dump_json() for name in ("model", "memory", "optimizer"))
        if key not in _PROBED:
            _PROBED[key] = probe(config)
        return _PROBED[key]

    monkeypatch.setattr(preflight, "check_architecture", probed)
