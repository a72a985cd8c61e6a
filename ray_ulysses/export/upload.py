"""Puts an export into an object store; its record goes last, and commits it there."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.export.record import RECORD_FILE, Identity, Record, existing_of
from ray_ulysses.storage.block_cache import cache_folder
from ray_ulysses.storage.place import Place, RemotePath
from ray_ulysses.storage.store import file_pieces


def staging_folder(published: Place) -> Path:
    """Return the directory in which an export is made: the published one, or a folder of this node for each URI."""
    if isinstance(published, Path):
        return published
    digest = hashlib.sha256(str(published).encode()).hexdigest()[:12]
    return cache_folder("exports") / digest / published.name


def already_uploaded(published: RemotePath, identity: Identity, *, overwrite: bool) -> Record | None:
    """Return the record of an identical export in a folder of an object store.

    Args:
        published: The folder.
        identity: Identity of the new export.
        overwrite: Whether another export may be replaced.

    Returns:
        None if the folder is free, or may be replaced; files without a record are of an export that was killed.

    Raises:
        UserError: It holds another export.
        RunError: It can't be read.
    """
    try:
        sizes = _sizes(published)
        there = existing_of((published / RECORD_FILE).read_bytes()) if RECORD_FILE in sizes else None
    except OSError as error:
        raise RunError(f"{published}: can't be read ({error.strerror or error}); make it reachable") from error
    if there is None or overwrite:
        return None
    if there.record is None:
        differences = ["another version of ray-ulysses wrote it"]
    else:
        lost = [f"{name} is not what was exported" for name, size in there.files.items() if sizes.get(name) != size]
        differences = identity.differences(there.record.identity) or lost
    if not differences:
        return there.record
    raise UserError(
        f"{published}: holds another export of ray-ulysses ({'; '.join(differences)}); add --overwrite to replace it, "
        "or give another directory with --out"
    )


def upload(folder: Path, published: RemotePath) -> None:
    """Put the files of an export into a folder of an object store, its record last, and delete them here.

    Whatever else is in the folder is deleted: it is of an export that is replaced, or of one that was killed.

    Raises:
        RunError: The store does not take them; what is there has no record, and a repetition replaces it.
    """
    names = sorted(path.name for path in folder.iterdir() if path.name != RECORD_FILE)
    store = published.open_store()
    try:
        store.delete(RECORD_FILE)
        for name in sorted(_sizes(published).keys() - {*names}):
            store.delete(name)
        for name in names:
            store.replace(name, file_pieces(folder / name))
        store.replace(RECORD_FILE, [(folder / RECORD_FILE).read_bytes()])
    except OSError as error:
        raise RunError(
            f"{published}: can't be written ({error.strerror or error}); nothing was published. Make it reachable, or "
            "give a local directory with --out"
        ) from error
    shutil.rmtree(folder, ignore_errors=True)


def _sizes(published: RemotePath) -> dict[str, int | None]:
    """Return the size of each file in a folder, by its name there."""
    found = published.parent.open_store().sizes(published.name)
    return {key.removeprefix(f"{published.name}/"): size for key, size in found.items()}
