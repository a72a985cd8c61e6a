"""One writer per run directory, on a path and in an object store."""

from __future__ import annotations

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.storage.hold import RunLease, current_owner, living_holder, run_hold
from ray_ulysses.storage.place import RemotePath, place_of
from tests.s3_server import S3Server


class _Clock:
    """A clock that jumps where somebody sleeps."""

    def __init__(self, now: float = 1.7e9) -> None:
        self.at = now
        self.slept: list[float] = []

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds
        self.slept.append(seconds)


def test_a_run_in_either_place_has_one_holder_who_is_named(location: str) -> None:
    place = place_of(location) / "run"
    assert current_owner(place) is None
    hold = run_hold(place)
    with hold:
        if isinstance(hold, RunLease):
            # Whoever looks waits for the next beat, which the thread gives after five seconds.
            hold.beat()
        with pytest.raises(UserError, match=r"run.name='run' is already running .*held by process \d+ on host"):
            run_hold(place).acquire()
    assert current_owner(place) is None


def test_who_was_killed_long_ago_is_dead_at_once_and_lately_after_half_a_lease(s3: S3Server, prefix: str) -> None:
    place = place_of(s3.uri(prefix))
    assert isinstance(place, RemotePath)
    store = place.open_store()
    assert living_holder(store, clock=_Clock()) is None
    lease = RunLease(store, run="run")
    lease.acquire(beat_in_background=False)
    lease.beat()
    written = store.modified_at("lock/beat-0000001")
    later = _Clock(written + 3600.0)
    assert living_holder(store, clock=later) is None and later.slept == []
    lately = _Clock(written + 60.0)
    assert living_holder(store, clock=lately) is None
    assert 14.9 < sum(lately.slept) < 17

    class _Beating(_Clock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            lease.beat()

    owner = living_holder(store, clock=_Beating(written + 60.0))
    assert owner is not None and owner.pid > 0
    lease.release()
    assert living_holder(store, clock=_Clock(written + 60.0)) is None


def test_the_text_of_a_refusal_names_the_setting(s3: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_of(s3.uri(prefix))
    monkeypatch.setattr("ray_ulysses.storage.hold._RETRY_S", 0.1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    away = place_of(str(place).partition("?")[0])
    with pytest.raises(UserError, match=r"the run storage of run '\S+' can't be used .*set another run\.storage"):
        run_hold(away).acquire()
