from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa
import pytest

from ray_ulysses.storage.retry import RetryPolicy, StorageAwayError, is_transient


@dataclass
class SleepingClock:
    """A clock that only sleeping moves."""

    at: float = 100.0
    pauses: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.at

    now = monotonic

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.at += seconds


def policy_of(clock: SleepingClock) -> RetryPolicy:
    return RetryPolicy(clock=clock)


def failing(times: int, error: Exception) -> Callable[[], str]:
    left = [error] * times

    def attempt() -> str:
        if left:
            raise left.pop()
        return "read"

    return attempt


def test_what_comes_back_is_read_with_growing_pauses_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    clock, stale = SleepingClock(), OSError(errno.ESTALE, "Stale file handle")
    with caplog.at_level(logging.WARNING, logger="ray_ulysses"):
        assert policy_of(clock).call("a/b.parquet", failing(9, stale)) == "read"
    assert clock.pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 8.0, 8.0]
    assert len(caplog.records) == 1


def test_waiting_is_bounded_and_its_end_says_how_long_it_was() -> None:
    clock = SleepingClock()
    with pytest.raises(StorageAwayError, match=r"a/b: .* 60 s \(14 tries"):
        policy_of(clock).call("a/b", failing(1000, OSError(errno.ETIMEDOUT, "timed out")))
    assert sum(clock.pauses) == pytest.approx(60.0)


def test_damage_is_not_waited_for() -> None:
    damages = (pa.ArrowInvalid("Parquet magic bytes not found in footer"), ValueError("[errno 5] in another error"))
    for error in (FileNotFoundError(errno.ENOENT, "No such file or directory"), *damages):
        clock = SleepingClock()
        with pytest.raises(type(error)) as caught:
            policy_of(clock).call("x", failing(1, error))
        assert caught.value is error and clock.pauses == []


def test_a_storage_that_is_away_is_known_by_the_systems_number_which_pyarrow_hands_on() -> None:
    for number in (errno.EIO, errno.ECONNRESET):
        assert is_transient(OSError(number, os.strerror(number)))
        assert is_transient(pa.ArrowException(f"Error reading bytes. Detail: [errno {number}] {os.strerror(number)}"))
    # Reading a process's memory at address 0 fails as a broken disk does.
    with pytest.raises(OSError) as caught:
        pa.OSFile("/proc/self/mem").read(10)
    assert caught.value.errno == errno.EIO and is_transient(caught.value)
