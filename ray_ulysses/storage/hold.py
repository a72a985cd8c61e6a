"""One writer per run directory, a file lock on a path or a lease in an object store, and a watch over it.

The holder of a lease is whoever created the highest ``lock/holder-<generation>.json``; creating one is exclusive.
Beside it the holder replaces ``lock/beat-<generation>`` all the time. A newcomer watches that beat: if it moves, the
holder lives, and the newcomer is refused; if it has not moved for `lease_s` of the newcomer's *own* clock, it creates
the next generation. No clock is ever compared with another's.

Two never hold it at once, as long as no clock runs a fifth faster than another: a beat counts from when it was *begun*,
and the holder trusts it for four fifths of `lease_s`; a newcomer counts from when it has *seen* it, which is later, and
looks once more after all of `lease_s`. A beat that was not through in the time of the one before counts for nothing,
since a newcomer may have missed it; the holder then has to win the next generation, as everybody else. Writes that were
on their way when the lease was lost may still arrive: that is what attempts are for, whose names differ.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from pydantic_core import from_json

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.storage.lock import LockOwner, RunLock, lock_owner
from ray_ulysses.storage.place import Place, RemotePath, place_of
from ray_ulysses.storage.store import Store, create_if_absent, read_bytes

if TYPE_CHECKING:
    from ray_ulysses.storage.object_store import ObjectStore

LOOK_EVERY_S = 1.0
_RETRY_S = 10.0
LOCK_FOLDER = "lock"
LEASE_S = 30.0
_TRUSTED_SHARE = 0.8
_BEATS_A_LEASE = 6
_CERTAINLY_OLD_S = 20 * 60.0
_RELEASED = "released"
_HOLDER = re.compile(rf"^{LOCK_FOLDER}/holder-(\d{{7,}})\.json$")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sight:
    """The newest holder as a newcomer sees it; generation 0 is nobody."""

    generation: int
    beat: str | None


class RunLease:
    """Holds a prefix of a store for this process, as `RunLock` holds a directory.

    Attributes:
        run: Name of the run, for errors.
        taken_over_from: The holder that stopped without releasing, if there was one.
    """

    def __init__(
        self,
        store: Store,
        *,
        run: str,
        setting: str = "checkpoint.storage",
        clock: Clock | None = None,
        lease_s: float = LEASE_S,
    ) -> None:
        """Prepare a lease; nothing is asked of the store yet.

        Args:
            store: The store; the lease's files are in its folder ``lock``.
            run: Name of the run.
            setting: The setting that names the store, for errors.
            clock: The time, and how to wait.
            lease_s: A holder that gives no sign for so long is taken for dead, in seconds. It must be the same for
                everybody who comes.
        """
        self.run = run
        self.taken_over_from: LockOwner | None = None
        self._store, self._lease_s = store, lease_s
        self._setting, self._what = setting, setting.replace(".", " ")
        self._clock = clock if clock is not None else SystemClock()
        self._nonce = uuid.uuid4().hex
        self._generation, self._count, self._trusted_until = 0, 0, float("-inf")
        self._lost = False
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, *, beat_in_background: bool = True) -> None:
        """Take the prefix; waits until a holder that is there has given a sign of life, or for `lease_s`.

        Args:
            beat_in_background: Renew it in a thread; otherwise the caller calls `beat`.

        Raises:
            UserError: Another live process holds it (the text says who and since when), or the store can't be
                written.
        """
        assert self._generation == 0, "the lease is held already"
        try:
            sight = _see(self._store)
            if sight.generation and sight.beat != _RELEASED:
                is_dead = self._is_silent(sight)
                self.taken_over_from = _owner_of(self._store, sight.generation) if is_dead else None
            if not self._win(sight.generation + 1):
                raise self._refusal(_see(self._store).generation)
        except OSError as error:
            raise UserError(
                f"the {self._what} of run {self.run!r} can't be used ({error.strerror or error}); repair it or "
                f"set another {self._setting}"
            ) from error
        if beat_in_background:
            self._thread = threading.Thread(target=self._keep_beating, name="run-lease", daemon=True)
            self._thread.start()

    @property
    def held(self) -> bool:
        """Return whether this process holds the prefix; asks the clock and not the store."""
        return bool(self._generation) and not self._lost and self._clock.monotonic() < self._trusted_until

    @property
    def lost(self) -> bool:
        """Return whether another process certainly holds the prefix, as of the last heartbeat; does no I/O.

        Unlike `held` being false, that is for good: a store that is away for a while takes the hold from nobody.
        """
        return self._lost

    def check(self) -> None:
        """Raise `RunError` if this process does not hold the prefix now."""
        if self.held:
            return
        if not self._lost:
            raise RunError(f"run {self.run!r} could not renew its hold on the {self._what} in time")
        owner = None
        with contextlib.suppress(OSError):
            owner = _owner_of(self._store, _see(self._store).generation)
        raise RunError(f"run {self.run!r} was taken over by {owner or 'another process'}")

    def beat(self) -> None:
        """Renew the lease once; raises `OSError` if the store fails. The thread does this."""
        with self._mutex:
            if self._generation and not self._lost:
                self._renew()

    def release(self) -> None:
        """Give the prefix back; releasing twice does nothing."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(self._lease_s)
        generation, self._generation = self._generation, 0
        if generation and not self._lost and (thread is None or not thread.is_alive()):
            # If the store is away, the next one waits for the lease to end.
            with contextlib.suppress(OSError):
                self._store.replace(_beat_key(generation), [_RELEASED.encode()])

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _keep_beating(self) -> None:
        while not self._stop.wait(self._lease_s / _BEATS_A_LEASE):
            # A store that is away is asked again; meanwhile the lease runs out.
            with contextlib.suppress(OSError):
                self.beat()

    def _renew(self) -> None:
        """Replace the beat and see that nobody has a higher generation."""
        begun = self._clock.monotonic()
        if begun >= self._trusted_until:
            # Somebody may be taking over at this moment, so the hold has to be won again.
            successor = self._generation + 1
            if self._win(successor):
                return
            if self._is_own(successor):
                # An earlier try came through and its answer did not; the next beat wins the one after it.
                self._generation = successor
            else:
                self._lost = True
            return
        self._count += 1
        self._store.replace(_beat_key(self._generation), [f"{self._nonce} {self._count}".encode()])
        if _newest(self._store) > self._generation:
            self._lost = True
        elif self._clock.monotonic() < self._trusted_until:
            self._trusted_until = begun + _TRUSTED_SHARE * self._lease_s

    def _win(self, generation: int) -> bool:
        """Try to become the holder of a generation; return whether this process is."""
        begun = self._clock.monotonic()
        note = LockOwner.this_process(self._clock).to_note(run=self.run, nonce=self._nonce)
        if not create_if_absent(self._store, _holder_key(generation), note):
            return False
        if _newest(self._store) > generation:
            # This number had been used and cleaned away while we were on our way.
            self._store.delete(_holder_key(generation))
            return False
        self._generation, self._trusted_until = generation, begun + _TRUSTED_SHARE * self._lease_s
        self._clean(generation)
        return True

    def _is_own(self, generation: int) -> bool:
        """Return whether this process has created a generation itself."""
        try:
            note = from_json(read_bytes(self._store, _holder_key(generation)))
        except (FileNotFoundError, ValueError):
            return False
        return isinstance(note, dict) and note.get("nonce") == self._nonce

    def _clean(self, generation: int) -> None:
        """Delete what is left of the generations before; what can't be deleted the next holder deletes."""
        with contextlib.suppress(OSError):
            for key in self._store.list(LOCK_FOLDER):
                number = re.search(r"-(\d+)", key)
                if number is not None and int(number[1]) < generation:
                    self._store.delete(key)

    def _is_silent(self, sight: _Sight) -> bool:
        """Watch a holder: True after `lease_s` without a sign, False if it releases; raise as soon as it lives."""
        seen_at = self._clock.monotonic()
        while True:
            self._clock.sleep(self._lease_s / _BEATS_A_LEASE / 2)
            # The look that decides must begin after the lease has ended: a late answer tells of an earlier time.
            asked_at = self._clock.monotonic()
            now = _see(self._store)
            if now.generation == sight.generation and now.beat == _RELEASED:
                return False
            if now != sight:
                raise self._refusal(now.generation)
            if asked_at - seen_at >= self._lease_s:
                return True

    def _refusal(self, generation: int) -> UserError:
        owner = _owner_of(self._store, generation)
        who = str(owner) if owner is not None else "another process that has not left its name yet"
        return UserError(
            f"run.name={self.run!r} is already running on its {self._what}: held by {who}; wait for it, stop "
            "it, or set another run.name"
        )


def living_holder(store: ObjectStore, *, clock: Clock | None = None) -> LockOwner | None:
    """Return who holds a prefix, or None if nobody who lives does; takes nothing.

    A holder replaces its beat several times in the time of a lease. One whose beat is older than any clock is wrong by
    (S3 refuses requests of a clock that is 15 minutes off) is dead; any other is watched for half a lease.

    Args:
        store: The store.
        clock: The time, and how to wait.

    Raises:
        OSError: The store does not answer.
    """
    clock = clock if clock is not None else SystemClock()
    sight = _see(store)
    if sight.generation == 0 or sight.beat == _RELEASED:
        return None
    with contextlib.suppress(FileNotFoundError):
        if clock.now() - store.modified_at(_beat_key(sight.generation)) > _CERTAINLY_OLD_S:
            return None
    until = clock.monotonic() + LEASE_S / 2
    while clock.monotonic() < until:
        clock.sleep(LEASE_S / _BEATS_A_LEASE / 5)
        now = _see(store)
        if now != sight:
            released = now.beat == _RELEASED
            return None if released else _owner_of(store, now.generation) or LockOwner(host="unknown", pid=0, since=0.0)
    return None


def _see(store: Store) -> _Sight:
    generation = _newest(store)
    try:
        beat = read_bytes(store, _beat_key(generation)).decode() if generation else None
    except FileNotFoundError:
        beat = None
    return _Sight(generation=generation, beat=beat)


def _owner_of(store: Store, generation: int) -> LockOwner | None:
    """Return who holds a generation; None if the file is gone or torn."""
    try:
        return LockOwner.from_note(read_bytes(store, _holder_key(generation)))
    except FileNotFoundError:
        return None


def _newest(store: Store) -> int:
    """Return the highest generation there is, 0 if there is none."""
    found = (_HOLDER.match(key) for key in store.list(LOCK_FOLDER))
    return max((int(match[1]) for match in found if match), default=0)


def _holder_key(generation: int) -> str:
    return f"{LOCK_FOLDER}/holder-{generation:07d}.json"


def _beat_key(generation: int) -> str:
    return f"{LOCK_FOLDER}/beat-{generation:07d}"


def run_hold(run_dir: Place) -> RunLock | RunLease:
    """Return a hold of a run's directory for this process; nothing is taken before it is entered."""
    if isinstance(run_dir, Path):
        return RunLock(run_dir)
    return RunLease(run_dir.open_store(_RETRY_S), run=run_dir.name, setting="run.storage")


def current_owner(run_dir: str | os.PathLike[str] | RemotePath) -> LockOwner | None:
    """Return who holds a run at the moment, or None if no live process does; takes nothing.

    In an object store, a holder that may have been killed within the last minutes is watched for half a lease.
    """
    place = place_of(run_dir)
    return lock_owner(place) if isinstance(place, Path) else living_holder(place.open_store(_RETRY_S))


class Hold(Protocol):
    """An exclusive hold of a run by this process."""

    @property
    def lost(self) -> bool:
        """Return whether another process certainly holds it."""
        ...

    def check(self) -> None:
        """Raise `RunError`, which says who has it, if this process does not."""
        ...


class LockWatch:
    """Checks holds periodically in a thread of its own, for the duration of a ``with`` block.

    It is a thread so that a file system that hangs does not block the caller as well.
    """

    def __init__(self, holds: Sequence[Hold], *, every_s: float = LOOK_EVERY_S) -> None:
        """Store the holds; the thread starts with the ``with`` block.

        Args:
            holds: Holds to watch.
            every_s: Time between two checks, in seconds.
        """
        self._holds, self._every_s = tuple(holds), every_s
        self._problem: RunError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name="lock-watch", daemon=True)

    @property
    def problem(self) -> RunError | None:
        """The error that names the new owner, once another process has taken the run; no I/O."""
        return self._problem

    def look(self) -> None:
        """Check once; a hold that can't be checked at the moment does not count as lost."""
        for hold in self._holds:
            if self._problem is None and hold.lost:
                try:
                    hold.check()
                except RunError as error:
                    self._problem = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(self._every_s)

    def _keep_looking(self) -> None:
        while self._problem is None and not self._stop.wait(self._every_s):
            with contextlib.suppress(OSError):
                self.look()
