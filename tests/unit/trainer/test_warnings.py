"""What rank 0 warns of is handed on, once, from any thread, and never ends anything."""

from __future__ import annotations

import threading

from ray_ulysses.logging import get_logger
from ray_ulysses.trainer.loop import warnings_forwarded

_log = get_logger(__name__)


def test_each_warning_of_the_package_is_told_once_for_the_time_of_the_block() -> None:
    told: list[str] = []
    with warnings_forwarded(told.append):
        _log.warning("the disk is %s", "slow")
        _log.warning("the disk is %s", "slow")
        _log.info("no news")
        thread = threading.Thread(target=_log.error, args=("MLflow is away",))
        thread.start()
        thread.join()
    _log.warning("too late")
    assert told == ["the disk is slow", "MLflow is away"]


def test_a_flood_of_warnings_has_a_bound() -> None:
    told: list[str] = []
    with warnings_forwarded(told.append):
        for number in range(1500):
            _log.warning("step %d is slow", number)
    assert len(told) == 1000


def test_a_warning_that_can_not_be_told_ends_nothing(capsys: object) -> None:
    def full(text: str) -> None:
        _log.warning("and while it is told, another: %s", text)
        raise OSError("the disk is full")

    with warnings_forwarded(full):
        _log.warning("something")
    with warnings_forwarded(None):
        _log.warning("nobody listens")
