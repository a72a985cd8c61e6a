"""A fake of CUDA that records which thread has chosen which device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch


class FakeCuda:
    """Fake of the parts of ``torch.cuda`` that copies of the state use."""

    def __init__(self) -> None:
        self.strays: list[str] = []
        """Names of the threads that used CUDA without choosing a device, and so would have opened the first GPU."""
        self.pinned: dict[int, int] = {}
        """Size of each pinned memory range, by address."""
        self._own = threading.local()

    @classmethod
    def installed(cls, patch: pytest.MonkeyPatch) -> FakeCuda:
        cuda = cls()
        patch.setattr(torch.cuda, "set_device", cuda.set_device)
        patch.setattr(torch.cuda, "device", cuda.device)
        patch.setattr(torch.cuda, "cudart", lambda: cuda)
        for name in ("Stream", "Event"):
            patch.setattr(torch.cuda, name, lambda *_: _Queue(cuda))
        patch.setattr(torch.cuda, "current_stream", lambda *_: _Queue(cuda))
        patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        return cuda

    @property
    def chosen(self) -> torch.device | None:
        return getattr(self._own, "device", None)

    def set_device(self, device: torch.device | None) -> None:
        self._own.device = device

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before = self.chosen
        self.set_device(device)
        yield
        self.set_device(before)

    def touch(self) -> None:
        if self.chosen is None:
            self.strays.append(threading.current_thread().name)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0
        self.touch()
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.touch()
        del self.pinned[address]


class _Queue:
    """A stream or an event."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self._cuda.touch()
