"""Lets one request to an object store fail for good, before or after the store has done what it was asked for."""

from __future__ import annotations

import contextlib
import errno
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ray_ulysses.storage.object_store import ObjectStore

WHEN = {"before": False, "after": True}
"""Whether a request that fails is carried out."""
_OWN_OF_A_CASE = re.compile(r"s3://bucket/[^/ ]*|\?endpoint_override=[^ :)]*|(?<=probe-)[0-9a-f-]{20,}")


def said(error: BaseException) -> str:
    return "ends: " + _OWN_OF_A_CASE.sub("*", str(error)).partition("; ")[0]


@dataclass(kw_only=True)
class FailingRequests:
    """The requests of all stores of this process, counted over all threads."""

    fails_at: int = 0
    is_carried_out: bool = False
    keys: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def struck(self) -> str | None:
        """The key of the request that failed, without what differs between cases; None if there were not so many."""
        is_there = 0 < self.fails_at <= len(self.keys)
        return _OWN_OF_A_CASE.sub("*", self.keys[self.fails_at - 1]) if is_there else None

    def fail(self, call: int, *, is_carried_out: bool = False) -> None:
        """Count from 1 again, and let a request fail."""
        self.fails_at, self.is_carried_out = call, is_carried_out
        self.keys.clear()

    @contextlib.contextmanager
    def installed(self) -> Iterator[FailingRequests]:
        """Stand between all stores and their servers."""
        tried = ObjectStore._tried

        def counted(store: ObjectStore, key: str, attempt: Callable[[], Any]) -> Any:
            with self._lock:
                self.keys.append(key)
                fails = len(self.keys) == self.fails_at
            found = tried(store, key, attempt) if not fails or self.is_carried_out else None
            if fails:
                raise OSError(errno.EIO, "the store failed", key)
            return found

        ObjectStore._tried = counted  # type: ignore[method-assign]
        try:
            yield self
        finally:
            ObjectStore._tried = tried  # type: ignore[method-assign]
