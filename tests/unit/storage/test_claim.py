"""The claim: one holder at a time, by what its machine knows or by nobody's clock but one's own, on any store."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.storage import Buffer, LocalStore, Store
from ray_ulysses.storage.claim import Claim
from tests.breadth import fast_only
from tests.polling import wait_until
from tests.stores import FaultyStore, HookedStore, Kind, MemoryStore

LEASE_S = 30.0
_SINCE = 1_700_000_000.0


class ManualClock:
    """A clock that only sleeping moves; what was scheduled happens on the way."""

    def __init__(self, start: float = 0.0) -> None:
        self.time = start
        self._scheduled: list[tuple[float, Callable[[], None]]] = []

    def now(self) -> float:
        return _SINCE + self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        end = self.time + seconds
        while self._scheduled and self._scheduled[0][0] <= end:
            self.time, action = self._scheduled.pop(0)
            action()
        self.time = end

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._scheduled.append((when, action))
        self._scheduled.sort(key=lambda item: item[0])


class SlowBeats(HookedStore):
    """A store on which replacing a file takes a time of the clock."""

    def __init__(self, inner: Store, clock: ManualClock) -> None:
        super().__init__(inner)
        self.clock, self.seconds = clock, 0.0

    def before(self, kind: Kind, key: str) -> None:
        self.clock.sleep(self.seconds if kind == "replace" else 0.0)


def _lease(store: Store, clock: ManualClock) -> Claim:
    """Return the claim of a process that sees no other's."""
    return Claim(store, run="demo", clock=clock, lease_s=LEASE_S, machine="")


def _take(store: Store, clock: ManualClock) -> Claim:
    lease = _lease(store, clock)
    lease.acquire(beat_in_background=False)
    return lease


def _beats_for(lease: Claim, clock: ManualClock, seconds: float) -> None:
    for step in range(1, int(seconds / 5) + 1):
        clock.at(clock.time + 5.0 * step, lease.beat)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_a_newcomer_is_refused_by_a_beat_with_who_and_since_when_on_its_own_clock(store: Store) -> None:
    first, clock = _take(store, ManualClock(start=1e9)), ManualClock(start=-5e8)
    _beats_for(first, clock, LEASE_S)
    with pytest.raises(UserError, match=r"run\.name='demo' is already running") as refused:
        _take(store, clock)
    assert f"process {os.getpid()} on host {socket.gethostname()} since 2055-" in str(refused.value)
    assert clock.time < -5e8 + LEASE_S / 3, "the first beat is enough"
    assert first.held


def test_a_holder_silent_for_the_lease_is_taken_over_and_notices(store: Store, clock: ManualClock) -> None:
    first = _take(store, clock)
    second = _take(store, clock)
    assert LEASE_S <= clock.time < LEASE_S * 1.2
    assert second.held and not first.held and first.problem is None
    assert second.taken_over_from is not None
    assert (second.taken_over_from.pid, second.taken_over_from.since) == (os.getpid(), _SINCE)
    first.beat()
    assert not first.held
    assert f"process {os.getpid()}" in str(first.problem)
    first.release()
    second.beat()
    assert second.held and second.problem is None


@pytest.mark.parametrize("released_at", [None, 6.0], ids=["before", "while somebody waits"])
def test_a_released_claim_is_free_at_once(store: Store, clock: ManualClock, released_at: float | None) -> None:
    first = _take(store, clock)
    if released_at is None:
        first.release()
        first.release()
    else:
        clock.at(released_at, first.release)
    second = _take(store, clock)
    assert clock.time < LEASE_S / 3 and not first.held
    assert second.held and second.taken_over_from is None


def test_of_several_newcomers_exactly_one_takes_over(store: Store, clock: ManualClock) -> None:
    _take(store, clock)
    barrier = threading.Barrier(6, timeout=30)

    def come(number: int) -> bool:
        own = ManualClock()
        own.at(LEASE_S - 0.1, lambda: barrier.wait() and None)
        lease = _lease(store, own)
        with contextlib.suppress(UserError):
            lease.acquire(beat_in_background=False)
        return lease.held

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(come, range(6))) == 1


def test_a_holder_that_was_away_has_to_win_again(store: Store, clock: ManualClock) -> None:
    first = _take(store, clock)
    clock.sleep(LEASE_S * 10)
    assert not first.held and first.problem is None
    first.beat()
    assert first.held and first.problem is None
    assert store.list("lock") == ["lock/holder-0000002.json"]
    # A challenger that watched the first generation sees that the holder is alive.
    newcomer = ManualClock()
    _beats_for(first, newcomer, LEASE_S)
    with pytest.raises(UserError):
        _take(store, newcomer)


def test_a_beat_counts_from_its_start_and_a_late_one_does_not_count(tmp_path: Path, clock: ManualClock) -> None:
    slow = SlowBeats(LocalStore(tmp_path), clock)
    first = _take(slow, clock)
    clock.sleep(5.0)
    slow.seconds = 10.0
    first.beat()
    assert clock.time == 15.0
    clock.sleep(5.0 + LEASE_S * 0.8 - 15.0 - 0.1)
    assert first.held, "for less time than others wait"
    slow.seconds = 1.0
    first.beat()
    # A challenger may have read the holder file before this beat, and be creating the next generation now.
    assert not first.held
    slow.seconds = 0.0
    first.beat()
    assert first.held and slow.list("lock") == ["lock/holder-0000002.json"]


def test_a_holder_whose_store_is_away_for_a_while_goes_on(tmp_path: Path, clock: ManualClock) -> None:
    lease = _take(FaultyStore(LocalStore(tmp_path), fail_at=1, kinds=["replace"]), clock)
    clock.sleep(10.0)
    with pytest.raises(OSError):
        lease.beat()
    clock.sleep(5.0)
    lease.beat()
    clock.sleep(20.0)
    assert lease.held


def test_a_number_that_was_used_and_cleaned_away_is_not_taken_again(tmp_path: Path, clock: ManualClock) -> None:
    store = LocalStore(tmp_path)
    _take(store, clock)

    class Late(HookedStore):
        """Two others come and go between this one's decision and its deed."""

        def create(self, key: str, chunks: Iterable[Buffer]) -> int:
            if key.endswith("holder-0000002.json"):
                others = ManualClock()
                _take(self.inner, others)
                _take(self.inner, others)
            return super().create(key, chunks)

    with pytest.raises(UserError, match="is already running"):
        _take(Late(store), clock)
    assert store.list("lock") == ["lock/holder-0000003.json"]


class LostAnswers(HookedStore):
    """A store that is away from the middle of a call on: what was asked for is done, and nobody hears of it."""

    is_away = False

    def after(self, kind: Kind, key: str, num_bytes: int) -> None:
        if self.is_away and kind == "create":
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


def test_a_hold_that_was_won_without_an_answer_is_not_taken_for_another_s(store: Store, clock: ManualClock) -> None:
    flaky = LostAnswers(store)
    lease = _take(flaky, clock)
    clock.sleep(LEASE_S)
    flaky.is_away = True
    with pytest.raises(OSError):
        lease.beat()
    flaky.is_away = False
    lease.beat()
    # A newcomer may have seen the second generation silent for a while: it is the third that counts.
    assert not lease.held and lease.problem is None
    lease.beat()
    assert lease.held and store.list("lock") == ["lock/holder-0000003.json"]


class Interleaved(HookedStore):
    """Before and after every call the others may do something, and time passes."""

    def __init__(self, inner: Store, between: Callable[[], None]) -> None:
        super().__init__(inner)
        self._between = between

    def before(self, kind: Kind, key: str) -> None:
        self._between()

    def after(self, kind: Kind, key: str, num_bytes: int) -> None:
        self._between()


class World:
    """Processes as threads of which one runs at a time: the one that wakes first. Only here does time pass."""

    def __init__(self, size: int) -> None:
        self.time, self.problems, self.takeovers = 0.0, list[str](), 0
        self.leases: dict[int, Claim] = {}
        self._wakes_at = {number: 0.1 * number for number in range(size)}
        self._turn = threading.Condition()

    def run(self, live: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(len(self._wakes_at)) as pool:
            for job in [pool.submit(self._live, live, number) for number in list(self._wakes_at)]:
                job.result(timeout=60)

    def _live(self, live: Callable[[int], None], me: int) -> None:
        self.wait(me, 0.1 * me)
        live(me)
        with self._turn:
            del self._wakes_at[me]
            self._turn.notify_all()

    def wait(self, me: int, seconds: float) -> None:
        with self._turn:
            self._wakes_at[me] = self.time + seconds
            self._turn.notify_all()
            assert self._turn.wait_for(lambda: min(self._wakes_at, key=lambda n: (self._wakes_at[n], n)) == me, 30)
            self.time = self._wakes_at[me]
            holding = [number for number, lease in self.leases.items() if lease.held]
            if len(holding) > 1:
                self.problems.append(f"{holding} hold it at {self.time:.1f}")


class WorldClock:
    """A clock of that world that runs a little fast or slow."""

    def __init__(self, world: World, me: int, rate: float) -> None:
        self._world, self._me, self._rate = world, me, rate

    def now(self) -> float:
        return _SINCE

    def monotonic(self) -> float:
        return self._world.time * self._rate

    def sleep(self, seconds: float) -> None:
        self._world.wait(self._me, seconds / self._rate)


@pytest.mark.parametrize("first", fast_only(range(0, 150, 30), 0))
def test_two_never_hold_it_at_once_whatever_is_late(first: int) -> None:
    worlds = {seed: _play(seed) for seed in range(first, first + 30)}
    assert {seed: world.problems for seed, world in worlds.items() if world.problems} == {}
    assert sum(world.takeovers for world in worlds.values()) > 2 * len(worlds)


def _play(seed: int) -> World:
    """Let four processes come and go, some of them without a word, on a store that is sometimes slow."""
    world, files = World(4), MemoryStore()

    def live(me: int) -> None:
        rng = random.Random(f"{seed} {me}")
        rate = 1.0 + 0.05 * (me - 1.5)

        def late() -> None:
            world.wait(me, rng.choice((0.01, 0.05, 0.1, 0.2)) if rng.random() < 0.9 else rng.uniform(5.0, 30.0))

        store = Interleaved(files, late)
        for _ in range(5):
            lease = Claim(store, run="demo", clock=WorldClock(world, me, rate), lease_s=LEASE_S, machine="")
            world.leases[me] = lease
            try:
                lease.acquire(beat_in_background=False)
                world.takeovers += lease.taken_over_from is not None
                for _ in range(rng.randrange(12)):
                    world.wait(me, 5.0)
                    lease.beat()
                if rng.random() < 0.3:
                    lease.release()
            except UserError:
                pass
            world.wait(me, rng.uniform(0.0, 40.0))

    world.run(live)
    return world


def test_the_thread_keeps_it_alive_and_ends_with_it(tmp_path: Path) -> None:
    lease_s = 0.9
    with Claim(LocalStore(tmp_path), run="demo", lease_s=lease_s) as lease:
        begun = time.monotonic()
        # On a busy machine a beat may be late, and the hold is won again.
        wait_until(lambda: time.monotonic() - begun > lease_s and lease.held, "it is held beyond its time")
    assert not any(thread.name == "claim" for thread in threading.enumerate())


_KINDS: tuple[Kind, ...] = ("create", "replace", "list", "delete", "open", "read")
_BEATS = 12


@pytest.fixture(params=["files", "an object store"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return LocalStore(tmp_path) if request.param == "files" else MemoryStore()


def _life(claim: Claim, clock: ManualClock) -> Iterator[None]:
    """Take a free claim, beat, fall silent for longer than the lease, win it again, beat and give it back."""
    with contextlib.suppress(OSError, UserError):
        claim.acquire(beat_in_background=False)
    yield
    for number in range(_BEATS):
        if number == _BEATS // 2:
            clock.sleep(LEASE_S * 2)
        _live_on(claim, clock)
        yield
    claim.release()


def _live_on(claim: Claim, clock: ManualClock) -> None:
    clock.sleep(LEASE_S / 6)
    with contextlib.suppress(OSError):
        claim.beat()


def _next_has_it(store: Store) -> bool:
    """Return whether a challenger on another machine acquires the claim within a lease."""
    clock = ManualClock()
    second = _take(store, clock)
    assert clock.time <= LEASE_S * 1.2
    return second.held


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_two_never_hold_it_whatever_call_fails(files: Store, when: Literal["before", "after"], lasting: bool) -> None:
    """The next one comes after each call that failed, and the first one goes on: one that dies is one that fails."""
    fail_at, has_failed = 0, True
    while has_failed:
        fail_at += 1
        files.delete("lock")
        error = OSError(5, "away")
        faulty = FaultyStore(files, fail_at=fail_at, error=error, kinds=_KINDS, when=when, lasting=lasting)
        clock = ManualClock()
        first, second = _lease(faulty, clock), None
        for _ in _life(first, clock):
            if faulty.has_failed and second is None:
                # It watches while the first one beats, as that does by its own clock.
                watching = ManualClock()
                second = _lease(files, watching)
                for step in range(1, 8):
                    watching.at(5.0 * step, partial(_live_on, first, clock))
                with contextlib.suppress(UserError):
                    second.acquire(beat_in_background=False)
            elif second is not None:
                second.beat()
            assert second is None or not (first.held and second.held), fail_at
        has_failed = faulty.has_failed
        if second is not None:
            second.release()
        assert _next_has_it(files), fail_at
    assert fail_at > _BEATS
