"""A lease on a store's root, for local files and object stores: at most one process holds the claim at a time.

The claim protects a run's directory or its checkpoint storage. The process that created the holder file with the
highest generation, ``lock/holder-<generation>.json``, holds the claim; `Store.create` admits one creator per file. The
holder file records the holder's host and process, and the holder rewrites the file with an increasing heartbeat count.
A challenger on the same machine checks whether the holder's process is alive. A challenger on another machine watches
the heartbeat count. If the count changes, the holder is alive and the challenger gives up. If the count does not change
for `lease_s` by the challenger's *own* clock, the challenger creates the next generation.

Two processes never hold the claim at once if clock rates differ by less than a fifth. Clock readings are never compared
across machines. A heartbeat is valid for four fifths of `lease_s` from the *start* of its write. A challenger starts
its full `lease_s` when it *reads* the heartbeat, which is later, and reads once more at the end. A heartbeat that
completes after the previous one has expired does not renew the lease, since a challenger may have missed it. The holder
must then create the next generation, like any challenger. Writes in flight when a process loses the claim may still
arrive, but their file names contain the attempt number.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.lock import LockOwner
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.storage.store import Store, create_if_absent
from ray_ulysses.validation import ContentError, read_json

LEASE_S = 30.0
LOCK_FOLDER = "lock"
_RETRY_S = 10.0
_TRUSTED_SHARE = 0.8
_BEATS_A_LEASE = 6
_CERTAINLY_OLD_S = 20 * 60.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_HOLDER = re.compile(rf"^{LOCK_FOLDER}/holder-(\d{{7,}})\.json$")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record(LockOwner):
    """The content of a holder file."""

    machine: str = ""
    """Id of the holder's machine; see `_this_machine`."""
    place: str = ""
    """Location of the claimed store. A copy of the store's files has another location, so the copy is not claimed."""
    started: str | None = None
    """Start time of the holder's process; see `_start_of`."""
    command: str = ""
    """Unique name of the holder's command; see `Claim`."""
    beat: int = 0
    is_released: bool = False


_RECORD = TypeAdapter(_Record)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sight:
    """The newest holder file at the time of a read. Generation 0 means that no holder file exists."""

    generation: int
    content: bytes

    @property
    def record(self) -> _Record | None:
        """The decoded holder file, or None if the file is damaged or missing."""
        try:
            return read_json(_RECORD, self.content)
        except ContentError:
            return None

    @property
    def is_free(self) -> bool:
        """Whether the store has never been claimed, or the last holder has released its claim."""
        record = self.record
        return self.generation == 0 or (record is not None and record.is_released)


class Claim:
    """This process's claim on a store's root, held until this process releases it, dies, or stops sending heartbeats.

    Attributes:
        run: Name of the run, for errors.
        taken_over_from: The previous holder, if it ended without releasing the claim.
        problem: An error that names the new holder, set once a heartbeat finds that another process has taken the
            claim. A temporary store outage does not set this attribute.
    """

    def __init__(
        self,
        store: Store,
        *,
        run: str,
        command: str | None = None,
        setting: str = "checkpoint.storage",
        clock: Clock | None = None,
        lease_s: float = LEASE_S,
        machine: str | None = None,
    ) -> None:
        """Prepare a claim without accessing the store.

        Args:
            store: The store. The claim's files are in its ``lock`` folder.
            run: Name of the run.
            command: Unique name of this command; None generates one.
            setting: The setting that specifies the store's location, for errors.
            clock: The time source.
            lease_s: Seconds without a heartbeat after which a holder is considered dead; the same for all processes.
            machine: This machine's id, for tests. If empty, no process can check whether another process is alive.
        """
        self.run = run
        self.taken_over_from: LockOwner | None = None
        self.problem: RunError | None = None
        self._store, self._lease_s = store, lease_s
        self._setting = setting
        self._clock = clock if clock is not None else SystemClock()
        self._machine = _this_machine() if machine is None else machine
        self._own = _Record(host="", pid=0, since=0.0, command=uuid.uuid4().hex if command is None else command)
        self._generation, self._trusted_until = 0, float("-inf")
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, *, beat_in_background: bool = True) -> None:
        """Acquire the claim. If the holder's process is not visible here, wait up to `lease_s` for a heartbeat first.

        Args:
            beat_in_background: Whether a thread sends the heartbeats. If False, the caller must call `beat`.

        Raises:
            UserError: Another live process holds the claim, or the store can't be written.
        """
        assert self._generation == 0, "the claim is already held"
        self._own = replace(
            self._own,
            **asdict(LockOwner.this_process(self._clock)),
            machine=self._machine,
            place=_place_of(self._store),
            started=_start_of(os.getpid()) if self._machine else None,
        )
        try:
            sight = _see(self._store)
            if not sight.is_free:
                lives = _lives(sight.record, self._machine, self._own.place)
                if lives:
                    raise self._refusal(sight)
                if lives is False or self._is_silent(sight):
                    self.taken_over_from = sight.record
            if not self._win(sight.generation + 1):
                raise self._refusal(_see(self._store))
        except UserError:
            raise
        except OSError as error:
            raise UserError(
                f"{self._setting}: the storage of run {self.run!r} can't be used ({error.strerror or error}); repair "
                f"it, or set {self._setting} to another location"
            ) from error
        if beat_in_background:
            self._thread = threading.Thread(target=self._keep_beating, name="claim", daemon=True)
            self._thread.start()

    @property
    def held(self) -> bool:
        """Whether this process certainly holds the claim, judged by the clock without accessing the store."""
        return bool(self._generation) and self.problem is None and self._clock.monotonic() < self._trusted_until

    def beat(self) -> None:
        """Send one heartbeat and check that this process still holds the claim; raise `OSError` if the store fails."""
        with self._mutex:
            if self._generation and self.problem is None:
                self._refuse_vanished()
                self._renew()

    def release(self) -> None:
        """Release the claim. Calling this method again has no effect."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(self._lease_s)
        generation, self._generation = self._generation, 0
        if generation and self.problem is None and (thread is None or not thread.is_alive()):
            self._own = replace(self._own, is_released=True)
            # If the store is unreachable, the next challenger waits until the lease ends.
            with contextlib.suppress(OSError):
                self._refuse_vanished()
                self._store.replace(_holder_key(generation), [self._note()])

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _keep_beating(self) -> None:
        while not self._stop.wait(self._lease_s / _BEATS_A_LEASE):
            # The next heartbeat retries. If the store stays unreachable, the lease expires.
            with contextlib.suppress(OSError):
                self.beat()

    def _renew(self) -> None:
        """Rewrite the holder file with a higher heartbeat count, and check that no higher generation exists."""
        begun = self._clock.monotonic()
        if begun >= self._trusted_until:
            # The lease has expired, and a challenger may be taking over at this moment.
            if self._win(self._generation + 1):
                return
            sight = _see(self._store)
            if sight.record is not None and sight.record.command == self._own.command:
                # An earlier create succeeded, but its response was lost. The next heartbeat creates another generation.
                self._generation = sight.generation
            else:
                self._lose(sight)
            return
        self._own = replace(self._own, beat=self._own.beat + 1)
        self._store.replace(_holder_key(self._generation), [self._note()])
        if max(_generations(self._store), default=0) > self._generation:
            self._lose(_see(self._store))
        elif self._clock.monotonic() < self._trusted_until:
            self._trusted_until = begun + _TRUSTED_SHARE * self._lease_s

    def _win(self, generation: int) -> bool:
        """Try to create a generation's holder file, and return whether this process now holds the claim."""
        begun = self._clock.monotonic()
        if not create_if_absent(self._store, _holder_key(generation), self._note()):
            return False
        others = _generations(self._store) - {generation}
        if max(others, default=0) > generation:
            # Another process created this generation, was succeeded, and its file was deleted since the last listing.
            self._store.delete(_holder_key(generation))
            return False
        self._generation, self._trusted_until = generation, begun + _TRUSTED_SHARE * self._lease_s
        # The next holder deletes any files that remain.
        with contextlib.suppress(OSError):
            for older in others:
                self._store.delete(_holder_key(older))
        return True

    def _note(self) -> bytes:
        return self._own.to_note(run=self.run)

    def _refuse_vanished(self) -> None:
        """Raise FileNotFoundError if the directory was deleted, since a write would create it again."""
        if isinstance(self._store, LocalStore) and not self._store.exists():
            raise FileNotFoundError(errno.ENOENT, "the directory no longer exists", str(self._store))

    def _lose(self, sight: _Sight) -> None:
        self.problem = RunError(f"run {self.run!r} was taken over by {sight.record or 'another process'}")

    def _is_silent(self, sight: _Sight) -> bool:
        """Return True if no heartbeat arrives for `lease_s`, False if the claim is released; raise if it is renewed."""
        seen_at = self._clock.monotonic()
        while True:
            self._clock.sleep(self._lease_s / _BEATS_A_LEASE / 2)
            # The deciding read must start after the lease has ended, since a slow read may return an older state.
            asked_at = self._clock.monotonic()
            if asked_at - seen_at >= self._lease_s:
                # On NFS, a write in the folder invalidates this host's cached listing.
                self._store.replace(f"{LOCK_FOLDER}/newcomer", [self._own.command.encode()])
                self._store.delete(f"{LOCK_FOLDER}/newcomer")
            now = _see(self._store)
            if now.generation == sight.generation and now.is_free:
                return False
            if now != sight:
                raise self._refusal(now)
            if asked_at - seen_at >= self._lease_s:
                return True

    def _refusal(self, sight: _Sight) -> UserError:
        return UserError(
            f"run.name={self.run!r} is already running: {self._setting} is in use by "
            f"{sight.record or 'another process'}; wait for that process, stop it, or set another run.name"
        )


def run_claim(run_dir: Place, command: str | None = None) -> Claim:
    """Return a claim on a run's directory, which entering the context acquires; for ``command`` see `Claim`."""
    return Claim(open_store(run_dir, retry_s=_RETRY_S), run=run_dir.name, command=command, setting="run.storage")


def other_holder(store: Store, command: str) -> LockOwner | None:
    """Return the last holder of a store's claim, or None if there is no holder or the holder is ``command``.

    Raises:
        OSError: The store does not respond.
    """
    record = _see(store).record
    return None if record is None or record.command == command else record


def current_owner(run_dir: str | Place, *, clock: Clock | None = None) -> LockOwner | None:
    """Return the live process that holds a run's claim, or None if there is none. The claim is not changed.

    A holder on another machine is considered dead if its file is older than `_CERTAINLY_OLD_S`, which exceeds any
    plausible clock skew (S3 rejects requests from a clock that is 15 minutes off). Otherwise its heartbeats are watched
    for half a lease.

    Raises:
        OSError: The store does not respond.
    """
    clock = clock if clock is not None else SystemClock()
    store = open_store(run_dir, retry_s=_RETRY_S)
    sight = _see(store)
    if sight.is_free:
        return None
    lives = _lives(sight.record, _this_machine(), _place_of(store))
    if lives is not None:
        return sight.record if lives else None
    with contextlib.suppress(FileNotFoundError):
        if clock.now() - store.modified_at(_holder_key(sight.generation)) > _CERTAINLY_OLD_S:
            return None
    until = clock.monotonic() + LEASE_S / 2
    while clock.monotonic() < until:
        clock.sleep(LEASE_S / _BEATS_A_LEASE / 5)
        now = _see(store)
        if now != sight:
            return None if now.is_free else now.record or LockOwner(host="unknown", pid=0, since=0.0)
    return None


def _see(store: Store) -> _Sight:
    generation, newest = 0, max(_generations(store), default=0)
    while newest != generation:
        generation = newest
        try:
            return _Sight(generation=generation, content=store.read_whole(_holder_key(generation)))
        except FileNotFoundError:
            # The next holder deleted the file after the listing.
            newest = max(_generations(store), default=0)
    return _Sight(generation=generation, content=b"")


def _generations(store: Store) -> set[int]:
    return {int(match[1]) for key in store.list(LOCK_FOLDER) if (match := _HOLDER.match(key))}


def _holder_key(generation: int) -> str:
    return f"{LOCK_FOLDER}/holder-{generation:07d}.json"


def _this_machine() -> str:
    """Return an id that is shared by exactly the processes of one PID namespace, or an empty string if unknown."""
    try:
        # Containers on one machine may share a host name but have separate process ids.
        return f"{_BOOT_ID.read_text().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _place_of(store: Store) -> str:
    return str(store.root.resolve() if isinstance(store, LocalStore) else store)


def _start_of(pid: int) -> str | None:
    """Return a process's start time in clock ticks since boot, or None if the process has ended.

    psutil's start time is not used because it changes when the system clock is set.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def _lives(record: _Record | None, machine: str, place: str) -> bool | None:
    """Return whether a holder's process is alive, or None if it is not visible to this process."""
    if record is None or not record.machine or record.machine != machine:
        return None
    try:
        os.kill(record.pid, 0)
        lives = _start_of(record.pid) == record.started
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        # The process belongs to another user, and /proc may hide other users' processes.
        return None
    return None if lives and record.place != place else lives
