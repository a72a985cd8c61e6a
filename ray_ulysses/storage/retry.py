"""Retries storage operations with exponential backoff for a bounded time while the storage is unreachable."""

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
# Errors of an unreachable network file system or disk. Errors of a missing or damaged file are not transient (ENOENT,
# EACCES, and pyarrow's checksum errors, which have no number).
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
# pyarrow 25 preserves the error number of most system errors, but a wrapped error has the number only in its text. If
# closing a file fails, which can happen when the storage disconnects during a write, the number is lost.
_NUMBER_IN_TEXT = re.compile(r"\[errno (\d+)\]", re.IGNORECASE)
_CLOSING_FAILED = "error closing file"


class StorageAwayError(RunError):
    """Storage stayed unreachable until the end of the retry time."""


def is_transient(error: BaseException) -> bool:
    """Return whether an error means that the storage was unreachable, so a retry may succeed."""
    if not isinstance(error, READ_ERRORS):
        return False
    number = getattr(error, "errno", None)
    if number is None and (found := _NUMBER_IN_TEXT.search(str(error))):
        number = int(found[1])
    return number in _TRANSIENT or str(error) == _CLOSING_FAILED


def transient_cause(error: BaseException) -> BaseException | None:
    """Return the first transient error among an error and its chain of causes, or None if none is transient."""
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
    """Time limits for retries."""

    wait_s: float = 60.0
    """Maximum time from the first failure until giving up, in seconds."""
    first_pause_s: float = 0.1
    """Pause before the first retry, in seconds. Each later pause is twice as long, up to `longest_pause_s`."""
    longest_pause_s: float = 8.0
    clock: Clock = field(default_factory=SystemClock)

    def begin(self) -> Waiting:
        """Return a `Waiting` whose retry time starts now."""
        return Waiting(self)

    def call(self, what: object, attempt: Callable[[], T]) -> T:
        """Call ``attempt``, retrying while it fails with transient errors, and return its result.

        Args:
            what: The path or name of the file or storage, for the log and the error.
            attempt: The function to call. Each call must reopen the file, since a stale handle stays stale.

        Raises:
            StorageAwayError: The storage was still unreachable after ``wait_s``.
            OSError: ``attempt`` failed with an error that is not transient. The error is raised without a retry.
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
                    log.warning("%s: storage unreachable (%s); retrying for %.0f s", what, error, self.wait_s)
                if not waiting.pause():
                    raise StorageAwayError(
                        f"{what}: the storage did not respond for {waiting.waited_s:.0f} s ({waiting.num_pauses + 1} "
                        f"tries, the last: {error}); restore access and start again; committed work is preserved"
                    ) from error

    def call_or_fail(self, what: object, attempt: Callable[[], T]) -> T:
        """Call ``attempt`` like `call`, but convert storage errors to `RunError`.

        Raises:
            RunError: The call failed; `StorageAwayError` if the storage was unreachable.
        """
        try:
            return self.call(what, attempt)
        except READ_ERRORS as error:
            raise RunError(f"{what}: {error}; fix the cause, then run the same command again to continue") from error


class Waiting:
    """The state of one series of retries."""

    def __init__(self, retry: RetryPolicy) -> None:
        self.num_pauses = 0
        self._retry, self._pause_s = retry, retry.first_pause_s
        self._begun = retry.clock.monotonic()

    @property
    def waited_s(self) -> float:
        """Seconds since this object was created."""
        return self._retry.clock.monotonic() - self._begun

    @property
    def goes_on(self) -> bool:
        """Whether any retry time is left."""
        return self.waited_s < self._retry.wait_s

    def pause(self) -> bool:
        """Pause before the next retry and return True, or return False at once if no retry time is left."""
        left_s = self._retry.wait_s - self.waited_s
        if left_s <= 0:
            return False
        self._retry.clock.sleep(min(self._pause_s, left_s))
        self._pause_s = min(2 * self._pause_s, self._retry.longest_pause_s)
        self.num_pauses += 1
        return True


RETRY = RetryPolicy()
"""The default retry policy."""
