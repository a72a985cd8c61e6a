"""The watch: what another has for certain is told within its time, what can't be asked now is not lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from ray_ulysses.errors import RunError
from ray_ulysses.storage import RunLock
from ray_ulysses.storage.hold import LockWatch
from ray_ulysses.storage.lock import LOCK_FILE
from tests.polling import wait_until


class FakeHold:
    """A hold that is lost when the test says so, or that can't be asked."""

    def __init__(self, *, is_lost: bool = False, hangs: threading.Event | None = None) -> None:
        self.is_lost, self.hangs = is_lost, hangs
        self.away = False

    @property
    def lost(self) -> bool:
        if self.hangs is not None:
            self.hangs.wait()
        if self.away:
            raise OSError("away")
        return self.is_lost

    def check(self) -> None:
        if self.is_lost:
            raise RunError("run 'demo' was taken over by process 7 on host other")


def _wait_for_problem(watch: LockWatch) -> RunError:
    wait_until(lambda: watch.problem is not None, "the hold is told as lost", every_s=0.005)
    assert watch.problem is not None
    return watch.problem


def test_the_hold_that_is_lost_is_told_with_who_has_it() -> None:
    first, second = FakeHold(), FakeHold()
    with LockWatch([first, second], every_s=0.01) as watch:
        time.sleep(0.05)
        assert watch.problem is None
        second.is_lost = True
        assert str(_wait_for_problem(watch)) == "run 'demo' was taken over by process 7 on host other"
    assert not any(thread.name == "lock-watch" for thread in threading.enumerate())


def test_a_hold_that_can_not_be_asked_is_not_lost_and_asked_again() -> None:
    hold = FakeHold()
    hold.away = True
    with LockWatch([hold], every_s=0.01) as watch:
        time.sleep(0.05)
        assert watch.problem is None
        hold.away, hold.is_lost = False, True
        _wait_for_problem(watch)


def test_a_file_system_that_hangs_takes_nobody_with_it() -> None:
    gate = threading.Event()
    begun = time.monotonic()
    with LockWatch([FakeHold(hangs=gate)], every_s=0.05) as watch:
        time.sleep(0.1)
        assert watch.problem is None
    assert time.monotonic() - begun < 5
    gate.set()


def test_a_real_lock_that_another_process_has_taken_is_told(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock, LockWatch([lock], every_s=0.01) as watch:
        watch.look()
        assert watch.problem is None
        (tmp_path / LOCK_FILE).write_text('{"host": "other", "pid": 7, "since": 1700000000.0}')
        assert "it was taken over by process 7 on host other since 2023-11-14" in str(_wait_for_problem(watch))
