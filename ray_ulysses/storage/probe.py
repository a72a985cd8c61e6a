"""Checks before a worker starts that a location can hold a run's files, by doing what a run will do there."""

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
    """A store broke a promise of `Store`; the text says which."""


def check_storage(storage: Path | str, *, setting: str = "run.storage", is_known: bool = False) -> None:
    """Check that runs can be kept at a location: it can be written, and creates files atomically.

    What it writes it deletes again; a directory that it had to make stays.

    Args:
        storage: A path, or the URI of an object store.
        setting: The setting that gave it, for errors.
        is_known: Whether a run has been kept there before: then only atomic creation is checked.

    Raises:
        UserError: They can't be; the text names the location, the reason and the way out.
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
        # On a path the folder is still there.
        is_clean = not isinstance(location, Path)
    except _UnfitError as error:
        raise UserError(f"{shown}: {error}; use a local disk, NFS, or another object store") from error
    except OSError as error:
        hint = "make the path writable for this user on every node"
        if isinstance(location, ObjectLocation):
            hint = "check the bucket, its region and endpoint, and the credentials in the environment"
        raise UserError(
            f"{shown} can't be written: {error.strerror or error}; {hint}, or set another {setting}"
        ) from error
    except UserError as error:
        # A file system without hard links.
        raise UserError(f"{shown}: {error}") from error
    finally:
        if not is_clean:
            # Where nothing could be written there is nothing to delete.
            with contextlib.suppress(OSError):
                store.delete(folder)


def _check_create(store: Store, key: str) -> None:
    """Create a file by several writers at once, exactly one of whom must succeed."""
    with ThreadPoolExecutor(_NUM_WRITERS) as pool:
        won = sum(pool.map(lambda _: create_if_absent(store, key, _FIRST), range(_NUM_WRITERS)))
    if won == 0:
        raise _UnfitError("none of several writers could create a file, so no checkpoint can be committed")
    if won > 1:
        raise _UnfitError(
            "two writers can create the same file there (conditional puts are ignored), so a checkpoint can't be "
            "committed safely"
        )


def _probe(store: Store, folder: str) -> None:
    """Create, replace, read, list and delete, and check each answer against what a store promises."""
    key = f"{folder}/file"
    _check_create(store, key)
    store.replace(key, [_SECOND])
    with store.open(key) as file:
        part = file.read_at(3, 4)
    if part == _FIRST[3:7]:
        raise _UnfitError("a file that was replaced is read as it was before")
    if part != _SECOND[3:7]:
        raise _UnfitError("reading a part of a file gives other bytes than were asked for")
    if store.list(folder) != [key]:
        raise _UnfitError("a file that was written is missing from the list of its folder")
    store.delete(key)
    if store.list(folder):
        raise _UnfitError("a file that was deleted is still listed")
