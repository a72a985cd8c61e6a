"""A kernel that gives few bytes at a time, as it may."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest


def read_little(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Let each read from a file give so many bytes at most."""
    preadv = os.preadv

    def little(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return preadv(descriptor, [buffers[0][:most]], offset)

    monkeypatch.setattr(os, "preadv", little)
