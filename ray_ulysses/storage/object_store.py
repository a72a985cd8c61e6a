"""A `Store` on S3 and compatible servers, Google Cloud Storage and Azure.

It uses `obstore` (the Rust crate `object_store`) because `pyarrow.fs` lacks conditional puts, which fail if the key
exists. Atomic checkpoint commits require conditional puts.

Atomicity guarantees and their limits:

- A small file, or a file passed as a list of chunks, is written by one conditional put. It appears atomically, and
  exactly one of several concurrent writers succeeds. Manifests, journal segments and locks are written this way.
- A longer stream is uploaded in parts with bounded memory. It also appears atomically, when the upload completes. If
  the chunk iterator raises an error, the upload is aborted and no file appears. However, `create` checks the key only
  before the first part. Two concurrent writers of one key may both succeed, and the last upload wins. Shard names
  therefore differ between attempts and ranks.
- If a process is killed during an upload, the uploaded parts remain. They are billed but not listed. Set a lifecycle
  rule on the bucket that aborts incomplete uploads, for example after a day.
- If the response to a put is lost, the put is sent again. A mark in the object's metadata distinguishes this writer's
  earlier success from another writer's file.
"""

from __future__ import annotations

import contextlib
import errno
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import obstore

from ray_ulysses.storage.block_cache import BlockCache, CachedObject
from ray_ulysses.storage.location import RETRY_S, ObjectLocation
from ray_ulysses.storage.object_client import Client, Refusal, connect, explain
from ray_ulysses.storage.retry import RetryPolicy
from ray_ulysses.storage.store import READ_AHEAD_BYTES, AlreadyExistsError, Buffer, Store, StoredFile, checked_key

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta

_PIECE_BYTES = 4 * 2**20


class ObjectFile(StoredFile):
    """One version of an object, opened for reading; see `StoredFile`.

    A small object is read completely when it is opened. For a large object, every request specifies the opened version,
    so bytes of two versions are never mixed: a read raises `OSError` if the object has been replaced.
    """

    def __init__(self, client: Client, key: str, *, name: str, retry: RetryPolicy) -> None:
        """Request the size and version of the object.

        Args:
            client: The client for the store.
            key: The object's key, relative to the client's prefix.
            name: The object's display name in errors.
            retry: The retry policy for failed reads.

        Raises:
            FileNotFoundError: The object does not exist.
            OSError: The request failed.
        """
        super().__init__(0)
        self._client, self._key, self._object_name, self._retry = client, key, name, retry
        waiting, looks = retry.begin(), 0
        while True:
            looks += 1
            try:
                meta = obstore.head(client, key)
            except Exception as error:
                raise explain(error).as_os_error(name, waiting.waited_s) from error
            self.size, self._version = meta["size"], meta["e_tag"]
            if self.size > READ_AHEAD_BYTES:
                return
            try:
                # Read a small object now, before it can be replaced.
                self._ahead = self.read_at(0, self.size)
                return
            except OSError as error:
                # The object was replaced after the head request. Retry at least once, even if the store is slow.
                if error.errno not in (errno.ESTALE, errno.ENOENT) or not (looks == 1 or waiting.goes_on):
                    raise

    def read_into(self, start: int, target: memoryview) -> int:
        """Read bytes from offset ``start`` with one request, plus one request for the rest after each interruption."""
        target = target[: max(self.size - start, 0)]
        if len(self._ahead) == self.size:
            return self._take_ahead(start, target)  # a small object, read completely by `__init__`
        done, waiting = 0, self._retry.begin()
        while done < target.nbytes:
            options: GetOptions = {"range": (start + done, start + target.nbytes)}
            if self._version is not None:
                options["if_match"] = self._version
            before = done
            try:
                for piece in obstore.get(self._client, self._key, options=options).stream(_PIECE_BYTES):
                    content = memoryview(piece)
                    target[done : done + content.nbytes] = content
                    done += content.nbytes
                refusal, cause = Refusal(meaning="transient", reason="the response was too short"), None
            except Exception as error:
                refusal, cause = explain(error), error
            if done > before:
                # A long read may be interrupted several times. Any progress restarts the retry time.
                waiting = self._retry.begin()
                continue
            if refusal.meaning == "changed":
                refusal = Refusal(meaning="changed", reason="the file was replaced during the read")
            if not refusal.may_pass or not waiting.pause():
                raise refusal.as_os_error(self._object_name, waiting.waited_s) from cause
        return done


# S3 allows 10,000 parts per file, so 16 MiB parts limit a file to 156 GiB.
PART_BYTES = 16 * 2**20
MAX_PARTS = 10_000
_PARALLEL_PARTS = 4
_LARGEST_PUT_BYTES = 2**30
_LARGEST_SINGLE_READ_BYTES = 8 * 2**20
_LIST_BATCH, _DELETE_BATCH = 1000, 1000
# Azure requires metadata names to be valid C# identifiers, so the name contains no dash.
_MARK = "ulysseswriter"

_T = TypeVar("_T")


class ObjectStore(Store):
    """A store under a prefix of a bucket.

    Attributes:
        location: The store's root.
        name: Display name in errors: scheme, bucket and prefix, without the host.
    """

    _cache: BlockCache | None = None

    def __init__(
        self,
        location: ObjectLocation,
        *,
        retry_s: float = RETRY_S,
        part_bytes: int = PART_BYTES,
        cache: BlockCache | None = None,
    ) -> None:
        """Create a client without sending a request.

        Args:
            location: Bucket, prefix and options. The prefix becomes the store's root.
            retry_s: Maximum time, in seconds, to retry a request while the store is unreachable or overloaded.
            part_bytes: Part size for multipart uploads, in bytes. The services require at least 5 MiB.
            cache: A cache for files opened by `open_ranges`.

        Raises:
            UserError: The client can't be created from the URI and the environment.
        """
        self.name = location.display_name
        self.location, self._retry_s, self._part_bytes = location, retry_s, part_bytes
        self._cache = cache
        self._retry = RetryPolicy(wait_s=retry_s, first_pause_s=0.05, longest_pause_s=5.0)
        _ = self._client

    def __str__(self) -> str:
        return self.name

    def named(self, key: str) -> str:
        """Return a file's display name, without the host."""
        return f"{self.name}/{key}"

    @cached_property
    def _client(self) -> Client:
        return connect(self.location, retry_s=self._retry_s)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the client and cache. An unpickled store uses its new process's credentials."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_client", "_cache")}

    def open(self, key: str) -> ObjectFile:
        """Open a file for reading; see `Store.open`."""
        return ObjectFile(self._client, checked_key(key), name=self.named(key), retry=self._retry)

    def read_whole(self, key: str, limit: int = -1) -> bytes:
        """Return a file's content, or its first ``limit`` bytes.

        A small file requires a single request. A large file is read as a stream, which resumes after interruptions.
        """

        def attempt() -> bytes | None:
            found = obstore.get(self._client, checked_key(key))
            size = found.meta["size"]
            if size > _LARGEST_SINGLE_READ_BYTES:
                return None
            content = bytes(found.bytes())
            if len(content) != size:
                raise ConnectionError("the response was too short")
            return content[: size if limit < 0 else limit]

        if (content := self._tried(key, attempt)) is not None:
            return content
        return super().read_whole(key, limit)

    def exists(self) -> bool:
        """Return whether the store contains any file."""
        return self._tried(".", lambda: any(map(len, obstore.list(self._client, chunk_size=1))))

    def root_names(self) -> list[str]:
        """Return the names of the files and folders in the root, with one request per thousand names."""
        return self._names(None)

    def names(self, folder: str) -> list[str]:
        """Return the names of the files and folders in a folder, with one request per thousand names."""
        return self._names(checked_key(folder))

    def _names(self, folder: str | None) -> list[str]:
        found = self._tried(folder or ".", lambda: obstore.list_with_delimiter(self._client, folder))
        names = [*found["common_prefixes"], *(meta["path"] for meta in found["objects"])]
        return sorted(name.rstrip("/").rpartition("/")[2] for name in names)

    def size(self, key: str) -> int:
        """Return the size of a file in bytes."""
        return self._head(key)["size"]

    def for_arrow(self, key: str) -> ObjectFile:
        """Open a file for pyarrow. Call this method before each read."""
        return self.open(key)

    def open_ranges(self, key: str) -> CachedObject:
        """Open a file for random access through the cache."""
        cache = self._cache or BlockCache(None, 0)
        meta = self._head(key)
        # The cache key includes the version, so blocks of a replaced file are never used.
        version, size = meta["e_tag"] or meta["last_modified"], meta["size"]
        return CachedObject(f"{self.location}\n{key}\n{version}\n{size}", size, partial(self.read_ranges, key), cache)

    def modified_at(self, key: str) -> float:
        """Return a file's modification time by the store's clock, in seconds since the epoch."""
        return self._head(key)["last_modified"].timestamp()

    def _head(self, key: str) -> ObjectMeta:
        return self._tried(key, lambda: obstore.head(self._client, checked_key(key)))

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range ``[start, end)``, fetched with parallel requests.

        Neighboring ranges share a request. A concurrent replacement of the file is not detected.
        """

        def attempt() -> list[bytes]:
            starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
            found = obstore.get_ranges(self._client, checked_key(key), starts=starts, ends=ends)
            contents = [bytes(one) for one in found]
            if any(len(one) != end - start for one, (start, end) in zip(contents, ranges, strict=True)):
                raise ConnectionError("the response was too short")
            return contents

        return self._tried(key, attempt)

    def create(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Create a file and return its size in bytes; see `Store.create` and the module docstring for guarantees."""
        return self._write(checked_key(key), chunks, "create")

    def replace(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Create or overwrite a file; see `Store.replace`."""
        return self._write(checked_key(key), chunks, "overwrite")

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Return the size in bytes of each file in a folder tree, taken from the listing; see `Store.sizes`."""
        checked_key(folder)

        def attempt() -> dict[str, int | None]:
            batches = obstore.list(self._client, folder, chunk_size=_LIST_BATCH)
            return dict(sorted((meta["path"], meta["size"]) for batch in batches for meta in batch))

        return self._tried(folder, attempt)

    def delete(self, prefix: str) -> None:
        """Delete a file or a folder tree; see `Store.delete`.

        Folder markers, which are empty objects created by consoles and file browsers, remain: their keys end with a
        slash, which obstore 0.12.1 strips from keys.
        """
        keys, left = self.list(prefix) or [prefix], list[str]()
        while keys and keys != left:
            for start in range(0, len(keys), _DELETE_BATCH):
                self.delete_files(keys[start : start + _DELETE_BATCH])
            keys, left = [] if keys == [prefix] else self.list(prefix), keys

    def delete_files(self, keys: Sequence[str]) -> None:
        """Delete at most a thousand files without listing them first. Missing files are ignored."""
        try:
            self._tried(keys[0], lambda: obstore.delete(self._client, [checked_key(key) for key in keys]))
        except FileNotFoundError:
            # Google and Azure raise it if another process deleted one of the files, or for a folder marker. The other
            # files may not have been deleted.
            for key in keys if len(keys) > 1 else ():
                self.delete_files([key])

    def _write(self, key: str, chunks: Iterable[Buffer], mode: Literal["create", "overwrite"]) -> int:
        whole = _given_whole(chunks)
        if whole is None:
            parts = _parts(chunks, self._part_bytes)
            first = next(parts, b"")
            second = next(parts, None)
            if second is not None:
                return self._put_parts(key, chain((first, second), parts), mode)
            whole = bytes(first)
        self._put(key, whole, mode)
        return len(whole)

    def _put(self, key: str, content: bytes, mode: Literal["create", "overwrite"]) -> None:
        """Write a file with one put. With `create`, exactly one of several concurrent writers succeeds."""
        mark = uuid.uuid4().hex

        def attempt() -> None:
            try:
                obstore.put(self._client, key, content, mode=mode, attributes={_MARK: mark}, use_multipart=False)
            except Exception as error:
                if explain(error).meaning not in ("taken", "changed"):
                    raise
                # Either an earlier try succeeded and its response was lost, or another writer's file exists, or the
                # file does not exist: S3 may reject two concurrent conditional puts and execute neither.
                found = self._mark_of(key)
                if found is None:
                    raise ConnectionError("another write of the file was in progress") from error
                if found != mark:
                    raise self._taken(key) from error

        try:
            self._tried(key, attempt)
        except OSError as error:
            # If the file exists with this mark, a try succeeded and only its response was lost.
            if error.errno != errno.EIO or not self._is_ours(key, mark):
                raise

    def _put_parts(self, key: str, parts: Iterator[Buffer], mode: Literal["create", "overwrite"]) -> int:
        if mode == "create" and self._mark_of(key) is not None:
            raise self._taken(key)
        counted = _Counted(parts, self._part_bytes)
        mark = uuid.uuid4().hex
        waiting = self._retry.begin()
        try:
            obstore.put(
                self._client,
                key,
                counted,
                attributes={_MARK: mark},
                use_multipart=True,
                chunk_size=self._part_bytes,
                max_concurrency=_PARALLEL_PARTS,
            )
        except BaseException as error:
            if counted.failure is not None:
                # Raise the chunk iterator's error unchanged.
                raise counted.failure from None
            if not isinstance(error, Exception):
                raise
            refusal = explain(error)
            if refusal.meaning == "away" or not self._is_ours(key, mark):
                raise refusal.as_os_error(self.named(key), waiting.waited_s) from error
        return counted.num_bytes

    def _mark_of(self, key: str) -> str | None:
        """Return a file's writer mark, an empty string if the file has no mark, or None if the file does not exist."""

        def attempt() -> str:
            found = obstore.get(self._client, key, options={"head": True}).attributes
            return next((value for name, value in found.items() if name.lower() == _MARK), "")

        try:
            return self._tried(key, attempt)
        except FileNotFoundError:
            return None

    def _is_ours(self, key: str, mark: str) -> bool:
        """Return whether a file is known to exist with this writer mark; False if the store does not respond."""
        with contextlib.suppress(OSError):
            return self._mark_of(key) == mark
        return False

    def _tried(self, key: str, attempt: Callable[[], _T]) -> _T:
        """Send a request, retrying after transient errors until the retry time is over."""
        waiting = self._retry.begin()
        while True:
            try:
                return attempt()
            except AlreadyExistsError:
                raise
            except Exception as error:
                refusal, cause = explain(error), error
            if not refusal.may_pass or not waiting.pause():
                raise refusal.as_os_error(self.named(key), waiting.waited_s) from cause

    def _taken(self, key: str) -> AlreadyExistsError:
        return AlreadyExistsError(f"{self.named(key)} already exists and was not overwritten")


class _Counted:
    """An iterator that forwards parts, counts their bytes, and stores the source iterator's error."""

    def __init__(self, parts: Iterator[Buffer], part_bytes: int) -> None:
        self.num_bytes = 0
        self.failure: BaseException | None = None
        self._parts, self._limit = parts, part_bytes * MAX_PARTS

    def __iter__(self) -> Iterator[Buffer]:
        return self

    def __next__(self) -> Buffer:
        try:
            part = next(self._parts)
            self.num_bytes += len(part)
            if self.num_bytes > self._limit:
                raise ValueError(f"the file exceeds the limit of {self._limit} bytes; use more ranks")
        except StopIteration:
            raise
        except BaseException as error:
            self.failure = error
            raise
        return part


def _given_whole(chunks: Iterable[Buffer]) -> bytes | None:
    """Return the joined chunks if they were given as a list and fit into one put; otherwise return None."""
    if not isinstance(chunks, list | tuple) or sum(memoryview(chunk).nbytes for chunk in chunks) > _LARGEST_PUT_BYTES:
        return None
    return bytes(chunks[0]) if len(chunks) == 1 else b"".join(chunks)


def _parts(chunks: Iterable[Buffer], part_bytes: int) -> Iterator[Buffer]:
    """Copy chunks into parts of equal size (the last may be smaller), so that the chunks' buffers can be reused."""
    part = bytearray()
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while view.nbytes:
            taken = view[: part_bytes - len(part)]
            part += taken
            view = view[taken.nbytes :]
            if len(part) == part_bytes:
                yield part
                part = bytearray()
    if part:
        yield part
