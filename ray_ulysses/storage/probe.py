"""Says before a worker starts whether a directory can hold a run."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from ray_ulysses.errors import UserError
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.store import AlreadyExistsError


def check_storage(storage: Path | str) -> None:
    """Check that runs can be kept under a directory: it can be made, written, and creates files atomically.

    What it writes it deletes again; a directory that it had to make stays.

    Args:
        storage: The setting ``run.storage``.

    Raises:
        UserError: It can't; the text names the path, the reason and the way out.
    """
    path = Path(storage).absolute()
    store = LocalStore(path)
    key = f".probe-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        store.create(key, [b"first"])
        try:
            store.create(key, [b"second"])
        except AlreadyExistsError:
            pass
        else:
            raise UserError(
                f"run.storage={str(storage)!r}: two writers can create the same file there, so a checkpoint "
                f"can't be committed safely; use a local disk or NFS"
            )
        with store.open(key) as stream:
            assert stream.read() == b"first"
    except OSError as error:
        raise UserError(
            f"run.storage={str(storage)!r} can't be written: {error.strerror or error}; make the path "
            f"writable for this user on every node, or set another run.storage"
        ) from error
    finally:
        _delete_quietly(store, key)


def _delete_quietly(store: LocalStore, key: str) -> None:
    """Delete the probe's file; where nothing could be written there is nothing to delete."""
    try:
        store.delete(key)
    except OSError:
        return
