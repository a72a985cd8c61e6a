"""Stores to test: a directory, and a prefix of an S3 server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from ray_ulysses.storage import LocalStore, Store, parse_location
from ray_ulysses.storage.object_store import ObjectStore
from tests.s3_server import FaultyProxy, S3Server

PART_BYTES = 5 * 2**20


def read_little(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Let each read from a local file give this many bytes at most, as the kernel may."""
    preadv = os.preadv

    def little(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return preadv(descriptor, [buffers[0][:most]], offset)

    monkeypatch.setattr(os, "preadv", little)


def object_store(uri: str, *, retry_s: float = 60.0) -> ObjectStore:
    """Return a store with the smallest parts."""
    return ObjectStore(parse_location(uri), retry_s=retry_s, part_bytes=PART_BYTES)


@pytest.fixture
def broken_s3(s3: S3Server, proxy: FaultyProxy, prefix: str) -> ObjectStore:
    """A store whose requests go through the proxy."""
    return object_store(s3.uri(prefix, proxy.port))


@pytest.fixture
def hasty_s3(s3: S3Server, proxy: FaultyProxy, prefix: str) -> ObjectStore:
    """The same store, which is soon given up."""
    return object_store(s3.uri(prefix, proxy.port), retry_s=1.0)


@pytest.fixture(params=["local", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path, prefix: str) -> str:
    """Where a store is, of each kind."""
    if request.param == "local":
        return str(tmp_path / "store")
    return request.getfixturevalue("s3").uri(prefix)


@pytest.fixture
def store(location: str) -> Store:
    """A store of each kind."""
    return object_store(location) if "://" in location else LocalStore(location)
