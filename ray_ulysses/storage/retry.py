"""Waits for a storage that is temporarily away, for a bounded time, with growing pauses, and logs it."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import pyarrow as pa

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.errors import RunError
from ray_ulysses.logging import get_logger

T = TypeVar("T")
log = get_logger(__name__)

READ_ERRORS = (OSError, pa.ArrowException)
# What a network file system or a disk path answers while it is away. Not among them: what names a damaged or a
# missing file (ENOENT, EACCES, and pyarrow's checksum errors, which carry no number).
_TRANSIENT = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EIO,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENOTCONN,
        errno.EREMOTEIO,
        errno.ESHUTDOWN,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)
# pyarrow 25 gives most errors of the system their number, but where one is wrapped only the text keeps it. It drops the
# number where closing a file fails, which happens to what was written when the storage goes away.
_NUMBER_IN_TEXT = re.compile(r"\[errno (\d+)\]", re.IGNORECASE)
_CLOSING_FAILED = "error closing file"


class StorageAwayError(RunError):
    """A storage did not answer for as long as we wait."""


def is_transient(error: BaseException) -> bool:
    """Return whether reading again may succeed: the storage was away, nothing says that the file is damaged."""
    if not isinstance(error, READ_ERRORS):
        return False
    number = getattr(error, "errno", None)
    if number is None:
        found = _NUMBER_IN_TEXT.search(str(error))
        number = int(found.group(1)) if found else None
    return number in _TRANSIENT or str(error) == _CLOSING_FAILED


def transient_cause(error: BaseException) -> BaseException | None:
    """Return the error, or the first of its causes, after which reading again may succeed."""
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        if is_transient(at):
            return at
        seen.append(at)
        at = at.__cause__ or at.__context__
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """The limits of a wait for a storage."""

    wait_s: float = 60.0
    """Seconds in all, from the first failure on, before giving up."""
    first_pause_s: float = 0.1
    """Pause before the first retry; each next one is twice as long."""
    longest_pause_s: float = 8.0
    clock: Clock = field(default_factory=SystemClock)

    def begin(self) -> Waiting:
        """Return a wait that begins now."""
        return Waiting(self)

    def call(self, what: object, attempt: Callable[[], T]) -> T:
        """Return what ``attempt`` returns, trying again while its storage is away.

        Args:
            what: What is read, for the log and the error: a path.
            attempt: Reads it; it must open the file again each time, since a stale handle stays stale.

        Raises:
            StorageAwayError: It was still away after ``wait_s``.
            OSError: Anything else that ``attempt`` raises passes at once, damage above all.
        """
        waiting: Waiting | None = None
        while True:
            try:
                return attempt()
            except READ_ERRORS as error:
                if transient_cause(error) is None:
                    raise
                if waiting is None:
                    waiting = self.begin()
                    log.warning("%s: the storage does not answer (%s); trying for %.0f s", what, error, self.wait_s)
                if not waiting.pause():
                    raise StorageAwayError(
                        f"{what}: the storage did not answer for {waiting.waited_s:.0f} s ({waiting.num_pauses + 1} "
                        f"tries, the last: {error}); make it reachable and start again, what is committed stays"
                    ) from error

    def call_or_fail(self, what: object, attempt: Callable[[], T]) -> T:
        """Do as ``call``, and turn any other error of the storage into a `RunError`.

        Raises:
            RunError: Names ``what`` and the reason; a ``StorageAwayError`` where the storage was away.
        """
        try:
            return self.call(what, attempt)
        except READ_ERRORS as error:
            raise RunError(f"{what}: {error}; fix it and run the same command again, which continues") from error


class Waiting:
    """One wait for a storage.

    Attributes:
        num_pauses: Pauses so far.
    """

    def __init__(self, retry: RetryPolicy) -> None:
        self.num_pauses = 0
        self._retry, self._pause_s = retry, retry.first_pause_s
        self._begun = retry.clock.monotonic()

    @property
    def waited_s(self) -> float:
        """Return the seconds since it began."""
        return self._retry.clock.monotonic() - self._begun

    @property
    def goes_on(self) -> bool:
        """Return whether another try is worth it."""
        return self.waited_s < self._retry.wait_s

    def pause(self) -> bool:
        """Pause before the next try; return False at once when the time for retries is over."""
        left_s = self._retry.wait_s - self.waited_s
        if left_s <= 0:
            return False
        self._retry.clock.sleep(min(self._pause_s, left_s))
        self._pause_s = min(2 * self._pause_s, self._retry.longest_pause_s)
        self.num_pauses += 1
        return True


RETRY = RetryPolicy()
"""The default wait for a storage."""
