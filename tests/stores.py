"""Stores for tests: one in memory, one that fails or dies at a chosen call, one that is slow, one that counts.

Each of the latter wraps any store and can wrap another wrapper. Their calls are of these kinds: ``open``, ``create``,
``replace``, ``list`` and ``delete`` as the store's methods, ``chunk`` for each piece of a file that is being written,
and ``read`` for each read from an opened file.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from ray_ulysses.storage.store import AlreadyExistsError, Buffer, Store, StoredFile, checked_key

Kind = Literal["open", "read", "create", "chunk", "replace", "list", "delete"]
KINDS: tuple[Kind, ...] = ("open", "read", "create", "chunk", "replace", "list", "delete")
WRITES: tuple[Kind, ...] = ("create", "chunk", "replace", "delete")
KILL = "KILL"  # as a `FaultyStore`'s error: the process dies by SIGKILL


def disk_full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def permission_lost() -> OSError:
    return PermissionError(errno.EACCES, os.strerror(errno.EACCES))


class MemoryFile(StoredFile):
    """A file of a `MemoryStore`."""

    def __init__(self, content: bytes) -> None:
        super().__init__(len(content))
        self._content = content

    def read_into(self, start: int, target: memoryview) -> int:
        found = self._content[start : start + len(target)]
        target[: len(found)] = found
        return len(found)


class MemoryStore(Store):
    """A store in this process's memory: fast, with no failures of its own, and safe between threads."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def open(self, key: str) -> StoredFile:
        with self._lock:
            if key not in self._files:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
            return MemoryFile(self._files[key])

    def create(self, key: str, chunks: Iterable[Buffer]) -> int:
        content = b"".join(chunks)
        with self._lock:
            if key in self._files:
                raise AlreadyExistsError(f"{key} already exists and was not overwritten")
            self._files[checked_key(key)] = content
        return len(content)

    def replace(self, key: str, chunks: Iterable[Buffer]) -> int:
        content = b"".join(chunks)
        with self._lock:
            self._files[checked_key(key)] = content
        return len(content)

    def list(self, prefix: str) -> list[str]:
        with self._lock:
            return sorted(key for key in self._files if key.startswith(f"{prefix}/"))

    def sizes(self, folder: str) -> dict[str, int | None]:
        return {key: len(self._files[key]) for key in self.list(folder)}

    def delete(self, prefix: str) -> None:
        for key in (prefix, *self.list(prefix)):
            with self._lock:
                self._files.pop(key, None)


class HookedStore(Store):
    """A store that calls `before` and `after` around every call of the one inside; alone it changes nothing."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def before(self, kind: Kind, key: str) -> None:
        """Run before a call; what it raises the caller gets instead of the call."""

    def after(self, kind: Kind, key: str, num_bytes: int) -> None:
        """Run after a call that succeeded; `num_bytes` were read or written by it."""

    def open(self, key: str) -> StoredFile:
        self.before("open", key)
        file = self.inner.open(key)
        self.after("open", key, 0)
        return HookedFile(self, key, file)

    def create(self, key: str, chunks: Iterable[Buffer]) -> int:
        self.before("create", key)
        size = self.inner.create(key, self._hooked(key, chunks))
        self.after("create", key, size)
        return size

    def replace(self, key: str, chunks: Iterable[Buffer]) -> int:
        self.before("replace", key)
        size = self.inner.replace(key, self._hooked(key, chunks))
        self.after("replace", key, size)
        return size

    def names(self, folder: str) -> list[str]:
        self.before("list", folder)
        names = self.inner.names(folder)
        self.after("list", folder, 0)
        return names

    def list(self, prefix: str) -> list[str]:
        self.before("list", prefix)
        keys = self.inner.list(prefix)
        self.after("list", prefix, 0)
        return keys

    def sizes(self, folder: str) -> dict[str, int | None]:
        self.before("list", folder)
        sizes = self.inner.sizes(folder)
        self.after("list", folder, 0)
        return sizes

    def delete(self, prefix: str) -> None:
        self.before("delete", prefix)
        self.inner.delete(prefix)
        self.after("delete", prefix, 0)

    def _hooked(self, key: str, chunks: Iterable[Buffer]) -> Iterator[Buffer]:
        for chunk in chunks:
            self.before("chunk", key)
            yield chunk
            self.after("chunk", key, memoryview(chunk).nbytes)


class HookedFile(StoredFile):
    """A file of a `HookedStore`."""

    def __init__(self, store: HookedStore, key: str, inner: StoredFile) -> None:
        super().__init__(inner.size)
        self._store, self._key, self._inner = store, key, inner

    def read_into(self, start: int, target: memoryview) -> int:
        self._store.before("read", self._key)
        size = self._inner.read_into(start, target)
        self._store.after("read", self._key, size)
        return size

    def close(self) -> None:
        self._inner.close()
        super().close()


class FaultyStore(HookedStore):
    """Raises an error, or dies, at one call of chosen kinds.

    To fail at every call in turn, count up `fail_at` until a run ends with `has_failed` false.
    """

    def __init__(
        self,
        inner: Store,
        *,
        fail_at: int,
        error: Exception | Literal["KILL"] | None = None,
        kinds: Iterable[Kind] = KINDS,
        when: Literal["before", "after"] = "before",
        lasting: bool = False,
        only: Callable[[str], bool] = lambda key: True,
    ) -> None:
        super().__init__(inner)
        self._fail_at, self._when, self._lasting, self._only = fail_at, when, lasting, only
        self._error = disk_full() if error is None else error
        self._kinds = frozenset(kinds)
        self._lock = threading.Lock()
        self.num_calls = 0
        self.has_failed = False

    def before(self, kind: Kind, key: str) -> None:
        if self._when == "before":
            self._count(kind, key)

    def after(self, kind: Kind, key: str, num_bytes: int) -> None:
        if self._when == "after":
            self._count(kind, key)

    def _count(self, kind: Kind, key: str) -> None:
        if kind not in self._kinds or not self._only(key):
            return
        with self._lock:
            self.num_calls += 1
            fails = self.num_calls == self._fail_at or (self._lasting and 0 < self._fail_at < self.num_calls)
            self.has_failed = self.has_failed or fails
        if not fails:
            return
        if isinstance(self._error, Exception):
            raise self._error
        os.kill(os.getpid(), signal.SIGKILL)


class SlowStore(HookedStore):
    """Takes its time, or waits for a test to let it go on."""

    def __init__(
        self,
        inner: Store,
        *,
        seconds: float = 0.0,
        gate: threading.Event | None = None,
        kinds: Iterable[Kind] = ("chunk", "read"),
        only: Callable[[str], bool] = lambda key: True,
        gate_timeout_s: float = 60.0,
    ) -> None:
        super().__init__(inner)
        self._seconds, self._gate, self._gate_timeout_s, self._only = seconds, gate, gate_timeout_s, only
        self._kinds = frozenset(kinds)
        self.is_waiting = threading.Event()

    def before(self, kind: Kind, key: str) -> None:
        if kind not in self._kinds or not self._only(key):
            return
        time.sleep(self._seconds)
        if self._gate is not None and not self._gate.is_set():
            self.is_waiting.set()
            if not self._gate.wait(self._gate_timeout_s):
                raise TimeoutError(f"nobody opened the gate for {kind} of {key}")


class CountingStore(HookedStore):
    """Counts what is asked of a store."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self.calls: Counter[Kind] = Counter()
        self.log: list[tuple[Kind, str]] = []
        self.bytes_read = 0
        self.bytes_written = 0

    def before(self, kind: Kind, key: str) -> None:
        with self._lock:
            self.calls[kind] += 1
            self.log.append((kind, key))

    def after(self, kind: Kind, key: str, num_bytes: int) -> None:
        with self._lock:
            self.bytes_read += num_bytes if kind == "read" else 0
            self.bytes_written += num_bytes if kind == "chunk" else 0
