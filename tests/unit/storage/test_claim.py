"""The claim: one holder at a time, by what its machine knows or by nobody's clock but one's own, on any store."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.storage import Buffer, Claim, LocalStore, Store, current_owner, run_claim
from ray_ulysses.storage.claim import LOCK_FOLDER
from ray_ulysses.storage.place import open_store, place_of
from tests.breadth import fast_only
from tests.polling import wait_until
from tests.s3_server import S3Server
from tests.stores import FaultyStore, HookedStore, Kind, MemoryStore, disk_full

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


def _lease(store: Store, clock: ManualClock) -> Claim:
    """Return the claim of a process that sees no other process."""
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
    class Slow(HookedStore):
        seconds = 0.0

        def before(self, kind: Kind, key: str) -> None:
            clock.sleep(self.seconds if kind == "replace" else 0.0)

    slow = Slow(LocalStore(tmp_path))
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


def test_a_hold_won_without_an_answer_is_not_mistaken_for_anothers(store: Store, clock: ManualClock) -> None:
    lease = _take(FaultyStore(store, fail_at=2, kinds=["create"], when="after"), clock)
    clock.sleep(LEASE_S)
    with pytest.raises(OSError):
        lease.beat()
    lease.beat()
    # A newcomer may have seen the second generation silent for a while: it is the third that counts.
    assert not lease.held and lease.problem is None
    lease.beat()
    assert lease.held and store.list("lock") == ["lock/holder-0000003.json"]


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

        class Interleaved(HookedStore):
            """Before and after every call the others may do something, and time passes."""

            def before(self, kind: Kind, key: str) -> None:
                world.wait(me, rng.choice((0.01, 0.05, 0.1, 0.2)) if rng.random() < 0.9 else rng.uniform(5.0, 30.0))

            def after(self, kind: Kind, key: str, num_bytes: int) -> None:
                self.before(kind, key)

        store = Interleaved(files)
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
        thread = lease._thread
    assert thread is not None
    wait_until(lambda: not thread.is_alive(), "it ends, after a beat under way")


_KINDS: tuple[Kind, ...] = ("create", "replace", "list", "delete", "open", "read")
_BEATS = 12


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


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_two_never_hold_it_whatever_call_fails(when: Literal["before", "after"], lasting: bool) -> None:
    """The next one comes after each call that failed, and the first one goes on."""
    fail_at, has_failed = 0, True
    while has_failed:
        fail_at, files = fail_at + 1, MemoryStore()
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
        clock = ManualClock()
        assert _take(files, clock).held and clock.time <= LEASE_S * 1.2, fail_at
    assert fail_at > _BEATS


HOLDER_FILE = f"{LOCK_FOLDER}/holder-0000001.json"
_HOLDER = """
import subprocess, sys, time
from ray_ulysses.storage import run_claim
from ray_ulysses.storage.place import open_store, place_of
run_claim(place_of(sys.argv[1])).acquire()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


class _NoSleep(ManualClock):
    def sleep(self, seconds: float) -> None:
        raise AssertionError("it waits")


@contextmanager
def _holder(location: Path | str) -> Iterator[subprocess.Popen[str]]:
    """Hold a run in a process with a child, which outlives it."""
    command = [sys.executable, "-c", _HOLDER, str(location)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        child = int(holder.stdout.readline())
        try:
            yield holder
        finally:
            holder.kill()
            os.kill(child, signal.SIGKILL)


def _take_run(run_dir: Path) -> Claim:
    claim = Claim(LocalStore(run_dir), run=run_dir.name, setting="run.storage", clock=_NoSleep())
    claim.acquire(beat_in_background=False)
    return claim


def test_a_run_in_either_place_is_held_by_one_while_it_lives_and_free_once_it_was_killed(location: str) -> None:
    place = place_of(location) / "run"
    assert current_owner(place) is None and not open_store(place).list("lock")
    with _holder(str(place)) as holder:
        named = rf"run.name='run' is already running: run.storage is in use by process {holder.pid} on host "
        with pytest.raises(UserError, match=named):
            run_claim(place).acquire()
        owner = current_owner(place, clock=_NoSleep())
        assert owner is not None and owner.pid == holder.pid
        # One that is stopped may go on.
        holder.send_signal(signal.SIGSTOP)
        with pytest.raises(UserError, match=named):
            run_claim(place).acquire()
        holder.kill()
        holder.wait(timeout=10)
        assert current_owner(place, clock=_NoSleep()) is None
        with run_claim(place) as claim:
            assert claim.taken_over_from is not None and claim.taken_over_from.pid == holder.pid
    assert current_owner(place) is None


def test_a_zombie_is_dead_also_if_its_run_was_moved(tmp_path: Path) -> None:
    with _holder(tmp_path) as holder:
        holder.send_signal(signal.SIGKILL)
        state = Path(f"/proc/{holder.pid}/stat")
        wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "Z", "it is a zombie")
        assert _take_run(tmp_path.rename(tmp_path.with_name("moved"))).taken_over_from is not None


def test_the_copy_of_a_run_that_is_being_trained_is_free_after_the_lease(tmp_path: Path) -> None:
    with run_claim(tmp_path / "run"):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        assert current_owner(tmp_path / "copy", clock=ManualClock()) is None
        clock = ManualClock()
        Claim(LocalStore(tmp_path / "copy"), run="copy", clock=clock).acquire(beat_in_background=False)
        assert clock.time < 40


@pytest.mark.parametrize("wrong", [{"started": "1"}, {"since": 1e300}, {"pid": -1}, {"pid": 2**62}])
def test_a_reused_pid_or_a_damaged_note_blocks_nobody_forever(tmp_path: Path, wrong: dict[str, object]) -> None:
    _take_run(tmp_path)
    path, is_reused = tmp_path / HOLDER_FILE, "started" in wrong
    path.write_text(json.dumps({**json.loads(path.read_text()), **wrong}))
    if is_reused:
        assert current_owner(tmp_path, clock=_NoSleep()) is None
    clock: ManualClock = _NoSleep() if is_reused else ManualClock()
    claim = Claim(LocalStore(tmp_path), run="run", clock=clock)
    claim.acquire(beat_in_background=False)
    assert clock.time < 40 and (claim.taken_over_from is None or claim.taken_over_from.host == socket.gethostname())
    assert claim.taken_over_from is not None or not is_reused


def test_a_holder_of_another_machine_is_watched_or_long_dead(s3: S3Server, prefix: str) -> None:
    place = place_of(s3.uri(prefix))
    store = open_store(place)
    claim = Claim(store, run="run", machine="")
    claim.acquire(beat_in_background=False)
    written = store.modified_at(HOLDER_FILE) - ManualClock().now()
    assert current_owner(place, clock=_NoSleep(written + 3600.0)) is None
    lately, beating = ManualClock(written + 60.0), ManualClock(written + 60.0)
    assert current_owner(place, clock=lately) is None
    assert 14.9 < lately.time - written - 60.0 < 17
    beating.at(written + 61.0, claim.beat)
    owner = current_owner(place, clock=beating)
    assert owner is not None and owner.pid == os.getpid()
    claim.release()
    assert current_owner(place, clock=_NoSleep(written + 60.0)) is None


@pytest.mark.usefixtures("s3")
def test_an_unusable_storage_is_refused_by_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^run\.storage: .*Not a directory"):
        _take_run(tmp_path / "file")
    with monkeypatch.context() as full:
        full.setattr("ray_ulysses.storage.local.write_all", Mock(side_effect=disk_full()))
        with pytest.raises(UserError, match=r"^run\.storage: .*No space left on device"):
            _take_run(tmp_path / "demo")
    assert _take_run(tmp_path / "demo").held
    monkeypatch.setattr("ray_ulysses.storage.claim._RETRY_S", 0.1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"^run\.storage: "):
        run_claim(place_of("s3://bucket/run")).acquire()


def test_a_run_directory_that_is_away_is_not_lost_and_not_made_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    clock = ManualClock()
    claim = Claim(LocalStore(run_dir), run="run", clock=clock)
    claim.acquire(beat_in_background=False)
    run_dir.rename(tmp_path / "away")
    for _ in range(10):
        clock.sleep(5.0)
        with pytest.raises(FileNotFoundError):
            claim.beat()
    assert claim.problem is None and not run_dir.exists()
    (tmp_path / "away").rename(run_dir)
    claim.beat()
    assert claim.held
    shutil.rmtree(run_dir)
    claim.release()
    assert not run_dir.exists()


@pytest.mark.parametrize("kind", ["a link", "a pipe"])
def test_a_holder_file_that_is_not_a_plain_file_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / LOCK_FOLDER).mkdir()
    (tmp_path / "canary").write_text("stays")
    if kind == "a link":
        (tmp_path / HOLDER_FILE).symlink_to(tmp_path / "canary")
    else:
        os.mkfifo(tmp_path / HOLDER_FILE)
    for ask in (current_owner, lambda place: run_claim(place).acquire()):
        with pytest.raises(UserError, match=rf"{HOLDER_FILE}(:)? is {kind}"):
            ask(tmp_path)
    assert (tmp_path / "canary").read_text() == "stays"
