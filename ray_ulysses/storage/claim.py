"""One holder at a time of a run's directory, or of the storage of its checkpoints, on files and in object stores.

The holder is whoever created the highest ``lock/holder-<generation>.json``; creating one is exclusive. It names the
holder's host and process, and the holder keeps replacing it with a higher count of heartbeats. A newcomer that
sees the holder's process, on the same machine, knows at once whether it lives. Any other newcomer watches the count: if
it moves, the holder lives, and the newcomer is refused; if it has not moved for `lease_s` of the newcomer's *own*
clock, it creates the next generation. No clock is ever compared with another's.

Two never hold it at once, as long as no clock runs a fifth faster than another: a beat counts from when it was *begun*,
and the holder trusts it for four fifths of `lease_s`; a newcomer counts from when it has *seen* it, which is later, and
looks once more after all of `lease_s`. A beat that was not completed in the time of the one before does not count,
since a newcomer may have missed it; the holder then has to win the next generation, like everybody else. Writes in
flight when the claim was lost may still arrive; they carry the names of their own attempt.
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
    """A holder, as its file names it."""

    machine: str = ""
    """See `_this_machine`."""
    place: str = ""
    """What it holds: the copy of a run that is being trained is held by nobody."""
    started: str | None = None
    """See `_start_of`."""
    command: str = ""
    """The command that holds it; see `Claim`."""
    beat: int = 0
    """Signs of life so far."""
    is_released: bool = False


_RECORD = TypeAdapter(_Record)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sight:
    """The newest holder as others see it; generation 0 is nobody."""

    generation: int
    content: bytes

    @property
    def record(self) -> _Record | None:
        """The holder; None if its file is torn or gone."""
        try:
            return read_json(_RECORD, self.content)
        except ContentError:
            return None

    @property
    def is_free(self) -> bool:
        """Whether nobody holds it, or the holder has given it back."""
        record = self.record
        return self.generation == 0 or (record is not None and record.is_released)


class Claim:
    """Holds the root of a store for this process until it is released, or the process ends or falls silent.

    Attributes:
        run: Name of the run, for errors.
        taken_over_from: The holder that ended without releasing, if there was one.
        problem: The error that names the new holder, once another process certainly has it, as of the last beat. A
            temporary outage of the store costs nobody the claim.
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
        """Prepare a claim; nothing is asked of the store yet.

        Args:
            store: The store; the claim's files are in its folder ``lock``.
            run: Name of the run.
            command: Unique name of this command; None generates one.
            setting: The setting that names the store, for errors.
            clock: The time, and how to wait.
            lease_s: A holder without a heartbeat for this long counts as dead, in seconds. It must be the same for
                every process.
            machine: This machine's id, for tests; empty where processes can't see one another.
        """
        self.run = run
        self.taken_over_from: LockOwner | None = None
        self.problem: RunError | None = None
        self._store, self._lease_s = store, lease_s
        self._setting, self._what = setting, setting.replace(".", " ")
        self._clock = clock if clock is not None else SystemClock()
        self._machine = _this_machine() if machine is None else machine
        self._own = _Record(host="", pid=0, since=0.0, command=uuid.uuid4().hex if command is None else command)
        self._generation, self._trusted_until = 0, float("-inf")
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, *, beat_in_background: bool = True) -> None:
        """Take it; where the holder's process can't be seen, wait for a sign of its life, or for `lease_s`.

        Args:
            beat_in_background: Renew it in a thread; otherwise the caller calls `beat`.

        Raises:
            UserError: Another live process holds it (the text says who and since when), or the store can't be
                written.
        """
        assert self._generation == 0, "it is held already"
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
                f"{self._setting}: the {self._what} of run {self.run!r} can't be used ({error.strerror or error}); "
                f"repair it or set another {self._setting}"
            ) from error
        if beat_in_background:
            self._thread = threading.Thread(target=self._keep_beating, name="claim", daemon=True)
            self._thread.start()

    @property
    def held(self) -> bool:
        """Return whether this process holds it for certain; asks the clock and not the store."""
        return bool(self._generation) and self.problem is None and self._clock.monotonic() < self._trusted_until

    def beat(self) -> None:
        """Renew it once, and look whether it is still this process's; raises `OSError` if the store fails."""
        with self._mutex:
            if self._generation and self.problem is None:
                self._refuse_vanished()
                self._renew()

    def release(self) -> None:
        """Give it back; releasing twice does nothing."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(self._lease_s)
        generation, self._generation = self._generation, 0
        if generation and self.problem is None and (thread is None or not thread.is_alive()):
            self._own = replace(self._own, is_released=True)
            # If the store is away, the next one waits for the lease to end.
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
            # A store that is away is asked again; meanwhile the lease runs out.
            with contextlib.suppress(OSError):
                self.beat()

    def _renew(self) -> None:
        """Replace the record by one of a higher count, and see that nobody has a higher generation."""
        begun = self._clock.monotonic()
        if begun >= self._trusted_until:
            # Somebody may be taking over at this moment, so it has to be won again.
            if self._win(self._generation + 1):
                return
            sight = _see(self._store)
            if sight.record is not None and sight.record.command == self._own.command:
                # An earlier try succeeded and its answer was lost; the next beat wins the generation after it.
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
        """Try to become the holder of a generation; return whether this process is."""
        begun = self._clock.monotonic()
        if not create_if_absent(self._store, _holder_key(generation), self._note()):
            return False
        others = _generations(self._store) - {generation}
        if max(others, default=0) > generation:
            # The number was used and deleted since it was chosen.
            self._store.delete(_holder_key(generation))
            return False
        self._generation, self._trusted_until = generation, begun + _TRUSTED_SHARE * self._lease_s
        # What can't be deleted the next holder deletes.
        with contextlib.suppress(OSError):
            for older in others:
                self._store.delete(_holder_key(older))
        return True

    def _note(self) -> bytes:
        return self._own.to_note(run=self.run)

    def _refuse_vanished(self) -> None:
        """Keep a directory that was deleted from being created again."""
        if isinstance(self._store, LocalStore) and not self._store.exists():
            raise FileNotFoundError(errno.ENOENT, "the directory is not there any more", str(self._store))

    def _lose(self, sight: _Sight) -> None:
        self.problem = RunError(f"run {self.run!r} was taken over by {sight.record or 'another process'}")

    def _is_silent(self, sight: _Sight) -> bool:
        """Watch a holder: True after `lease_s` without a sign, False if it releases; raise as soon as it lives."""
        seen_at = self._clock.monotonic()
        while True:
            self._clock.sleep(self._lease_s / _BEATS_A_LEASE / 2)
            # The look that decides must begin after the lease has ended: a late answer describes an earlier time.
            asked_at = self._clock.monotonic()
            if asked_at - seen_at >= self._lease_s:
                # NFS shows what other hosts have written in a folder once this one has written there.
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
            f"run.name={self.run!r} is already running on its {self._what}: held by "
            f"{sight.record or 'another process that has not left its name yet'}; wait for it, stop it, or set another "
            "run.name"
        )


def run_claim(run_dir: Place, command: str | None = None) -> Claim:
    """Return the claim of this process on a run's directory; nothing is taken before it is entered.

    Args:
        run_dir: The directory.
        command: See `Claim`.
    """
    return Claim(open_store(run_dir, retry_s=_RETRY_S), run=run_dir.name, command=command, setting="run.storage")


def other_holder(store: Store, command: str) -> LockOwner | None:
    """Return the last holder of a store, released or not; None if there is none, or if it is this command.

    Raises:
        OSError: The store does not answer.
    """
    record = _see(store).record
    return None if record is None or record.command == command else record


def current_owner(run_dir: str | Place, *, clock: Clock | None = None) -> LockOwner | None:
    """Return who holds a run at the moment, or None if no live process does; takes nothing.

    A holder of another machine whose file is older than any clock is wrong by (S3 refuses requests of a clock that is
    15 minutes off) is dead; any other is watched for half a lease.

    Raises:
        OSError: The store does not answer.
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
            # The next holder has deleted it since it was listed.
            newest = max(_generations(store), default=0)
    return _Sight(generation=generation, content=b"")


def _generations(store: Store) -> set[int]:
    return {int(match[1]) for key in store.list(LOCK_FOLDER) if (match := _HOLDER.match(key))}


def _holder_key(generation: int) -> str:
    return f"{LOCK_FOLDER}/holder-{generation:07d}.json"


def _this_machine() -> str:
    """Return what only processes have in common that see one another's process ids; empty where it is not known."""
    try:
        # Containers of one machine may have one host name, and process ids of their own.
        return f"{_BOOT_ID.read_text().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _place_of(store: Store) -> str:
    return str(store.root.resolve() if isinstance(store, LocalStore) else store)


def _start_of(pid: int) -> str | None:
    """Return when a process started, in ticks since the machine did; None if it has ended.

    Not psutil's time, which moves when the machine's clock is set.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def _lives(record: _Record | None, machine: str, place: str) -> bool | None:
    """Return whether the process that holds a place lives; None where this process can't see it."""
    if record is None or not record.machine or record.machine != machine:
        return None
    try:
        os.kill(record.pid, 0)
        lives = _start_of(record.pid) == record.started
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        # Another user's, and processes of others may be hidden.
        return None
    return None if lives and record.place != place else lives
