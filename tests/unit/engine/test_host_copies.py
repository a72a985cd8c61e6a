"""The range of host memory that activations are copied to: pinned as it is used, or pageable with one warning."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, field
from unittest.mock import MagicMock

import pytest
import torch

from ray_ulysses.engine import activation_offload
from ray_ulysses.engine.activation_offload import CudaCopies, PinnedRange, host_range
from ray_ulysses.errors import UserError
from tests.unit.fake_cuda import FakeCuda

PIECE = 4096


@dataclass
class Cudart:
    """A fake `torch.cuda.cudart()` with a limit on pinned memory."""

    room: int
    pinned: dict[int, int] = field(default_factory=dict)
    refused: int = 0

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        if sum(self.pinned.values()) + size > self.room:
            self.refused += 1
            return 2
        self.pinned[pointer] = size
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.pinned[pointer]
        return 0


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "PIECE_BYTES", PIECE)


def test_memory_is_pinned_as_it_is_used_and_no_more_than_is_needed() -> None:
    cudart = Cudart(room=1 << 30)
    pinned = PinnedRange(host_range(3 * PIECE + 100), torch.device("cpu"), lambda: cudart)
    assert cudart.pinned == {}
    parts = list(pinned.pieces(PIECE - 10, PIECE + 30))
    # No copy reaches over two pieces, which CUDA may refuse.
    assert [(len(host), part) for host, part in parts] == [
        (10, slice(0, 10)),
        (PIECE, slice(10, PIECE + 10)),
        (20, slice(PIECE + 10, PIECE + 30)),
    ]
    assert list(cudart.pinned.values()) == [PIECE] * 3
    list(pinned.pieces(0, 3 * PIECE + 100))
    assert list(cudart.pinned.values()) == [PIECE] * 3 + [100]
    assert [b - a for a, b in zip(cudart.pinned, list(cudart.pinned)[1:], strict=False)] == [PIECE] * 3
    del pinned, parts
    gc.collect()
    assert cudart.pinned == {}


def test_memory_that_can_not_be_pinned_stays_pageable_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    cudart = Cudart(room=PIECE)
    pinned = PinnedRange(host_range(4 * PIECE), torch.device("cpu"), lambda: cudart)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            parts = list(pinned.pieces(0, 4 * PIECE))
    assert len(parts) == 4
    assert cudart.refused == 1 and len(cudart.pinned) == 1
    (record,) = caplog.records
    assert f"beyond {PIECE} bytes (CUDA error 2)" in record.getMessage()


def test_memory_is_pinned_and_unpinned_on_its_own_gpu_by_whichever_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda.installed(monkeypatch)
    pinned = PinnedRange(host_range(2 * PIECE), torch.device("cuda", 3))
    list(pinned.pieces(0, 2 * PIECE))
    assert len(cuda.pinned) == 2
    # Garbage is collected on any thread.
    del pinned
    gc.collect()
    assert cuda.pinned == {} and cuda.strays == []


def test_copies_run_on_their_own_stream_between_the_computations(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = MagicMock()
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(room=1 << 30))
    copies = CudaCopies(3 * PIECE, torch.device("cpu"))
    values = torch.arange(2 * PIECE).to(torch.uint8)
    target = torch.zeros_like(values)
    for copy in (lambda: copies.copy_out(values, 100), lambda: copies.copy_in(100, target)):
        copies.wait(copy())
    assert torch.equal(target, values)
    # The current stream is looked up each time, because the backward pass has its own.
    each = [
        "current_stream", "Stream().wait_stream", "Event", "stream", "stream().__enter__", "Event().record",
        "stream().__exit__", "current_stream", "current_stream().wait_event",
    ]  # fmt: skip
    assert [name for name, *_ in cuda.mock_calls] == ["Stream", *each, *each]
    cuda.stream.assert_called_with(cuda.Stream())
    cuda.Event().record.assert_called_with(cuda.Stream())
    cuda.current_stream().wait_event.assert_called_with(cuda.Event())


def test_memory_that_the_system_does_not_have_is_refused() -> None:
    with pytest.raises(UserError, match=r"^memory\.offload_activations: [\d,]+ bytes of host memory can't be reserved"):
        host_range(1 << 62)
