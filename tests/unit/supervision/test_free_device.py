"""A new child waits for the memory of the one before on its GPU."""

from __future__ import annotations

import logging

import pytest
import torch

from ray_ulysses.clock import SystemClock
from ray_ulysses.errors import RunError
from ray_ulysses.supervision.child import choose_free_device
from tests.unit.fake_cuda import FakeCuda

DEVICE, GIB = torch.device("cuda", 3), 2**30
FULL = RuntimeError("CUDA error: out of memory")


class HandClock(SystemClock):
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.time = 0.0

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda.installed(monkeypatch)


def wait(*held: float | RuntimeError, within_s: float = 10.0) -> float:
    """Wait for a GPU of 80 GiB of which so much is held at each look, and return for how long."""
    looks, clock = [*held], HandClock()

    def memory(device: torch.device) -> tuple[int, int]:
        assert device == DEVICE
        now = looks.pop(0) if len(looks) > 1 else looks[0]
        if isinstance(now, RuntimeError):
            raise now
        return int((80 - now) * GIB), 80 * GIB

    choose_free_device(DEVICE, within_s, memory=memory, clock=clock)
    return clock.time


def test_a_device_that_is_free_is_chosen_at_once(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    assert wait(0.5) == 0.0
    # Four ranks of one GPU, each with its context.
    assert wait(2.0) == 0.0
    assert cuda.chosen == DEVICE and caplog.text == ""


def test_the_memory_of_the_process_before_is_waited_for(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    assert wait(FULL, 71.0, 71.0, 0.5) == pytest.approx(0.6)
    assert caplog.text == ""


def test_memory_that_is_held_for_good_is_named(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert wait(30.0) == pytest.approx(10.0, abs=0.3)
    (record,) = caplog.records
    assert record.getMessage().startswith("30.0 of 80.0 GiB of the memory of cuda:3 are still held by other processes")
    assert "nvidia-smi" in record.getMessage()


def test_a_device_without_room_for_a_context_is_an_error_that_names_it(cuda: FakeCuda) -> None:
    with pytest.raises(RunError, match=r"^nearly all of the memory of cuda:3 are still held.* after a wait of 10 s"):
        wait(FULL)


def test_another_error_is_not_waited_for(cuda: FakeCuda) -> None:
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        wait(RuntimeError("CUDA error: unspecified launch failure"))
