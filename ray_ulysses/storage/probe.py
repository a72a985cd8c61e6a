"""Checks a storage location before workers start, by performing the operations that a run needs."""

from __future__ import annotations

import contextlib
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ray_ulysses.errors import UserError
from ray_ulysses.storage.location import ObjectLocation, parse_location
from ray_ulysses.storage.place import open_store
from ray_ulysses.storage.store import Store, create_if_absent

_NUM_WRITERS = 2
_RETRY_S = 5.0
_FIRST, _SECOND = b"0123456789", b"abcdefghij"


class _UnfitError(Exception):
    """A store violated a guarantee of `Store`."""


def check_storage(storage: Path | str, *, setting: str = "run.storage", is_known: bool = False) -> None:
    """Check that a location is writable and supports atomic creation of files.

    The function deletes its test files but keeps a directory that it had to create.

    Args:
        storage: A path or an object store URI.
        setting: The setting that specifies the location, for errors.
        is_known: Whether the location already stores a run. If so, only atomic creation is checked.

    Raises:
        UserError: The location can't store runs.
    """
    location = parse_location(storage)
    store = open_store(storage, retry_s=_RETRY_S)
    shown = f"{setting}={str(storage)!r}"
    folder = f".probe-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    is_clean = False
    try:
        if is_known:
            _check_create(store, f"{folder}/file")
            store.delete(f"{folder}/file")
        else:
            _probe(store, folder)
        # On a path, the empty folder still exists.
        is_clean = not isinstance(location, Path)
    except _UnfitError as error:
        raise UserError(f"{shown}: {error}; use a local disk, NFS, or another object store") from error
    except OSError as error:
        hint = "make the path writable for this user on every node"
        if isinstance(location, ObjectLocation):
            hint = "check the bucket, its region and endpoint, and the credentials in the environment"
        raise UserError(
            f"{shown}: can't write to this location ({error.strerror or error}); {hint}, or change {setting}"
        ) from error
    except UserError as error:
        # The file system does not support hard links.
        raise UserError(f"{shown}: {error}") from error
    finally:
        if not is_clean:
            # If the location is not writable, the folder does not exist.
            with contextlib.suppress(OSError):
                store.delete(folder)


def _check_create(store: Store, key: str) -> None:
    """Check that exactly one of several concurrent writers can create a file."""
    with ThreadPoolExecutor(_NUM_WRITERS) as pool:
        won = sum(pool.map(lambda _: create_if_absent(store, key, _FIRST), range(_NUM_WRITERS)))
    if won == 0:
        raise _UnfitError("several writers tried to create the same file, but none succeeded, so nothing can be saved")
    if won > 1:
        raise _UnfitError(
            "two writers created the same file (conditional puts are ignored), so checkpoints can't be committed safely"
        )


def _probe(store: Store, folder: str) -> None:
    """Check that create, replace, read, list and delete behave as `Store` guarantees."""
    key = f"{folder}/file"
    _check_create(store, key)
    store.replace(key, [_SECOND])
    with store.open(key) as file:
        part = file.read_at(3, 4)
    if part == _FIRST[3:7]:
        raise _UnfitError("a read returns the old content of a replaced file")
    if part != _SECOND[3:7]:
        raise _UnfitError("a ranged read returns wrong bytes")
    if store.list(folder) != [key]:
        raise _UnfitError("the listing of a folder lacks a new file")
    store.delete(key)
    if store.list(folder):
        raise _UnfitError("the listing of a folder contains a deleted file")
