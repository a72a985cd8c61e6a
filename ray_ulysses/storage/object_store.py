"""A `Store` on S3 and compatible servers, on Google Cloud Storage and on Azure.

It uses `obstore` (the Rust crate `object_store`) and not `pyarrow.fs`, since the latter has no put that
fails where the key is taken, and without that a checkpoint can't be committed.

What is atomic, and what is not:

- A file that is given whole (a list of chunks) or fits into one part is one conditional put: it appears at once,
  and of several writers exactly one succeeds. Manifests, journal segments and locks are such files.
- A longer stream goes up in parts, in bounded memory. It, too, appears at once and whole, when it is completed, and
  if its chunks raise an error nothing appears and the upload is aborted. But exclusion is a check of the key before the
  first part: two writers of the same name at the same time may both succeed, and the later one's bytes stay. Shards
  therefore carry names that no other attempt or rank uses.
- A process that is killed in the middle of such an upload leaves parts that no listing shows but that are paid for.
  Give the bucket a lifecycle rule that aborts incomplete uploads after a day, say.
- A put whose answer was lost is sent again. A mark in the object's metadata distinguishes an earlier success
  from another writer's file.
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
    """An object as it was when it was opened; see `StoredFile`.

    Every request names the version that was opened, so that bytes of two versions are never mixed: a large object
    that is replaced while it is read gives an `OSError`, a small one is read whole when it is opened.
    """

    def __init__(self, client: Client, key: str, *, name: str, retry: RetryPolicy) -> None:
        """Request the size and version of the object.

        Args:
            client: The store.
            key: The object, relative to the client's prefix.
            name: Its display name in errors.
            retry: How long a broken read is taken up again.

        Raises:
            FileNotFoundError: There is no such object.
            OSError: The store does not give them.
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
                # At once, so that its replacement can't get between.
                self._ahead = self.read_at(0, self.size)
                return
            except OSError as error:
                # Once more however slow the store is: one replacement is no reason to give up.
                if error.errno not in (errno.ESTALE, errno.ENOENT) or not (looks == 1 or waiting.goes_on):
                    raise

    def read_into(self, start: int, target: memoryview) -> int:
        """Fill a buffer by one request; if it breaks off, ask for the rest."""
        target = target[: max(self.size - start, 0)]
        if len(self._ahead) == self.size:
            return self._take_ahead(start, target)  # a small object, read whole
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
                refusal, cause = Refusal(meaning="transient", reason="it sent too few bytes"), None
            except Exception as error:
                refusal, cause = explain(error), error
            if done > before:
                # A long read may break more than once: only one without progress counts.
                waiting = self._retry.begin()
                continue
            if refusal.meaning == "changed":
                refusal = Refusal(meaning="changed", reason="the file was replaced while it was read")
            if not refusal.may_pass or not waiting.pause():
                raise refusal.as_os_error(self._object_name, waiting.waited_s) from cause
        return done


# 10,000 parts of 16 MiB make 156 GiB, S3's limit for a file of parts of this size.
PART_BYTES = 16 * 2**20
MAX_PARTS = 10_000
_PARALLEL_PARTS = 4
_LARGEST_PUT_BYTES = 2**30
_LARGEST_SINGLE_READ_BYTES = 8 * 2**20
_LIST_BATCH, _DELETE_BATCH = 1000, 1000
# No dash: Azure takes only names that are identifiers in C#.
_MARK = "ulysseswriter"

_T = TypeVar("_T")


class ObjectStore(Store):
    """Files under a prefix of a bucket.

    Attributes:
        location: Where it is.
        name: Its display name in errors: scheme, bucket and prefix, without host.
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
        """Set up a client; nothing is sent yet.

        Args:
            location: Bucket, prefix and options; the prefix is this store's root.
            retry_s: How long a request is tried again while the store is away or overloaded, in seconds.
            part_bytes: Size of a part of a long file; the services ask for at least 5 MiB.
            cache: Keeps blocks of files that are read by ranges.

        Raises:
            UserError: The environment's settings can't be used.
        """
        self.name = location.display_name
        self.location, self._retry_s, self._part_bytes = location, retry_s, part_bytes
        self._cache = cache
        self._retry = RetryPolicy(wait_s=retry_s, first_pause_s=0.05, longest_pause_s=5.0)
        _ = self._client

    def __str__(self) -> str:
        return self.name

    def named(self, key: str) -> str:
        """Return the display name of a file, without hosts."""
        return f"{self.name}/{key}"

    @cached_property
    def _client(self) -> Client:
        return connect(self.location, retry_s=self._retry_s)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle neither client nor cache: another process connects with its own credentials at the first request."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_client", "_cache")}

    def open(self, key: str) -> ObjectFile:
        """Open a file for reading; raises `FileNotFoundError` if there is none."""
        return ObjectFile(self._client, checked_key(key), name=self.named(key), retry=self._retry)

    def read_whole(self, key: str, limit: int = -1) -> bytes:
        """Return a whole file, or its first bytes if there is a limit.

        It takes a single request; a large file is read as a stream, which resumes where it breaks.
        """

        def attempt() -> bytes | None:
            found = obstore.get(self._client, checked_key(key))
            size = found.meta["size"]
            if size > _LARGEST_SINGLE_READ_BYTES:
                return None
            content = bytes(found.bytes())
            if len(content) != size:
                raise ConnectionError("it sent too few bytes")
            return content[: size if limit < 0 else limit]

        content = self._tried(key, attempt)
        if content is not None:
            return content
        return super().read_whole(key, limit)

    def exists(self) -> bool:
        """Return whether there is any file."""
        return self._tried(".", lambda: any(map(len, obstore.list(self._client, chunk_size=1))))

    def root_names(self) -> list[str]:
        """Return the names of the files and the folders at its root, by one request for a thousand of them."""
        found = self._tried(".", lambda: obstore.list_with_delimiter(self._client))
        names = [*found["common_prefixes"], *(meta["path"] for meta in found["objects"])]
        return sorted(name.rstrip("/").rpartition("/")[2] for name in names)

    def size(self, key: str) -> int:
        """Return the size of a file in bytes."""
        return self._head(key)["size"]

    def for_arrow(self, key: str) -> ObjectFile:
        """Open a file for pyarrow; ask again for each reading."""
        return self.open(key)

    def open_ranges(self, key: str) -> CachedObject:
        """Open a file to be read by ranges, through the cache."""
        cache = self._cache or BlockCache(None, 0)
        meta = self._head(key)
        # Another version is another file.
        version, size = meta["e_tag"] or meta["last_modified"], meta["size"]
        return CachedObject(f"{self.location}\n{key}\n{version}\n{size}", size, partial(self.read_ranges, key), cache)

    def modified_at(self, key: str) -> float:
        """Return when a file was written, by the store's clock, in seconds since the epoch."""
        return self._head(key)["last_modified"].timestamp()

    def _head(self, key: str) -> ObjectMeta:
        return self._tried(key, lambda: obstore.head(self._client, checked_key(key)))

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes ``[start, end)`` of each range, by several requests at the same time.

        Neighbouring ranges share a request. A file that is replaced meanwhile is not noticed.
        """

        def attempt() -> list[bytes]:
            starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
            found = obstore.get_ranges(self._client, checked_key(key), starts=starts, ends=ends)
            contents = [bytes(one) for one in found]
            if any(len(one) != end - start for one, (start, end) in zip(contents, ranges, strict=True)):
                raise ConnectionError("it sent too few bytes")
            return contents

        return self._tried(key, attempt)

    def create(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Write a new file and return its size in bytes; see the module for what is atomic, and `Store.create`."""
        return self._write(checked_key(key), chunks, "create")

    def replace(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Write a file in place of the one there, if any; readers see the old or the new one."""
        return self._write(checked_key(key), chunks, "overwrite")

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Return the size in bytes of each file under a folder, by its key, from the listing."""
        checked_key(folder)

        def attempt() -> dict[str, int | None]:
            batches = obstore.list(self._client, folder, chunk_size=_LIST_BATCH)
            return dict(sorted((meta["path"], meta["size"]) for batch in batches for meta in batch))

        return self._tried(folder, attempt)

    def delete(self, prefix: str) -> None:
        """Delete a file, or a folder with all that is in it; what is not there is deleted already.

        Empty objects that mark folders, as consoles and file browsers make them, stay: their keys end with a slash,
        which obstore 0.12.1 cuts off.
        """
        keys, left = self.list(prefix) or [prefix], list[str]()
        while keys and keys != left:
            for start in range(0, len(keys), _DELETE_BATCH):
                self.delete_files(keys[start : start + _DELETE_BATCH])
            keys, left = [] if keys == [prefix] else self.list(prefix), keys

    def delete_files(self, keys: Sequence[str]) -> None:
        """Delete files without listing them, at most a thousand; what is not there is deleted already."""
        try:
            self._tried(keys[0], lambda: obstore.delete(self._client, [checked_key(key) for key in keys]))
        except FileNotFoundError:
            # Google and Azure raise it for a file that another process deleted, and for a folder's marker; they may
            # have kept the others.
            for key in keys if len(keys) > 1 else ():
                self.delete_files([key])

    def _write(self, key: str, chunks: Iterable[Buffer], mode: Literal["create", "overwrite"]) -> int:
        """Write a file as one put, or as a stream of parts where it is too long for that."""
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
        """Write a file by one put, which with `create` succeeds for exactly one of several writers."""
        mark = uuid.uuid4().hex

        def attempt() -> None:
            try:
                obstore.put(self._client, key, content, mode=mode, attributes={_MARK: mark}, use_multipart=False)
            except Exception as error:
                if explain(error).meaning not in ("taken", "changed"):
                    raise
                # An earlier success whose answer was lost, another's file, or neither: S3 gives the same answer to
                # two concurrent conditional puts, and may have carried out neither.
                found = self._mark_of(key)
                if found is None:
                    raise ConnectionError("another write of it was under way") from error
                if found != mark:
                    raise self._taken(key) from error

        try:
            self._tried(key, attempt)
        except OSError as error:
            # If only the answers were lost, the file is there, which is a success.
            if error.errno != errno.EIO or not self._is_ours(key, mark):
                raise

    def _put_parts(self, key: str, parts: Iterator[Buffer], mode: Literal["create", "overwrite"]) -> int:
        """Write a long file in parts and return its size in bytes."""
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
                # An error of the caller's own chunks reaches the caller unchanged.
                raise counted.failure from None
            if not isinstance(error, Exception):
                raise
            refusal = explain(error)
            if refusal.meaning == "away" or not self._is_ours(key, mark):
                raise refusal.as_os_error(self.named(key), waiting.waited_s) from error
        return counted.num_bytes

    def _mark_of(self, key: str) -> str | None:
        """Return the mark of who wrote a file, empty if there is none on it; None if there is no such file."""

        def attempt() -> str:
            found = obstore.get(self._client, key, options={"head": True}).attributes
            return next((value for name, value in found.items() if name.lower() == _MARK), "")

        try:
            return self._tried(key, attempt)
        except FileNotFoundError:
            return None

    def _is_ours(self, key: str, mark: str) -> bool:
        """Return whether a file is there and was written with this mark, as far as the store says."""
        with contextlib.suppress(OSError):
            return self._mark_of(key) == mark
        return False

    def _tried(self, key: str, attempt: Callable[[], _T]) -> _T:
        """Carry out a request, again and again while it fails for a reason that may pass."""
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
        return AlreadyExistsError(f"{self.named(key)} exists already; nothing was written over it")


class _Counted:
    """Hands parts on, counts their bytes, and keeps their error, which must reach the caller unchanged."""

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
                raise ValueError(f"a file of more than {self._limit} bytes can't be stored; use more ranks")
        except StopIteration:
            raise
        except BaseException as error:
            self.failure = error
            raise
        return part


def _given_whole(chunks: Iterable[Buffer]) -> bytes | None:
    """Return the content of a file whose chunks are all in memory already; None if they are made one by one."""
    if not isinstance(chunks, list | tuple) or sum(memoryview(chunk).nbytes for chunk in chunks) > _LARGEST_PUT_BYTES:
        return None
    return bytes(chunks[0]) if len(chunks) == 1 else b"".join(chunks)


def _parts(chunks: Iterable[Buffer], part_bytes: int) -> Iterator[Buffer]:
    """Copy chunks of any size into parts of one size, the last one shorter; the caller may reuse its chunks."""
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
