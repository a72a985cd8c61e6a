"""Places of a run's files: a path, or a prefix of an object store that is read with the same few methods as a path.

A `RemotePath` has only those methods of `pathlib.Path` that read, so that code which looks for the small files of a run
needs no branch. Whoever writes opens the `Store` of the directory (`store_at`), on a path and on an object store alike.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ray_ulysses.storage.block_cache import cache_folder
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.location import RETRY_S, ObjectLocation, expand_home, parse_location

if TYPE_CHECKING:
    from ray_ulysses.storage.object_store import ObjectStore
    from ray_ulysses.storage.store import Store


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A file or a folder of an object store.

    Attributes:
        location: Where it is.
    """

    location: ObjectLocation

    def __truediv__(self, name: str) -> RemotePath:
        """Return a file or a folder in this folder."""
        prefix = f"{self.location.prefix}/{name}" if self.location.prefix else name
        return RemotePath(replace(self.location, prefix=prefix))

    def __str__(self) -> str:
        return str(self.location)

    @property
    def name(self) -> str:
        """The last part of it."""
        return self.location.prefix.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The folder that holds it."""
        return RemotePath(replace(self.location, prefix=self.location.prefix.rpartition("/")[0]))

    def absolute(self) -> RemotePath:
        """Return itself: a URI means the same everywhere."""
        return self

    def open_store(self, retry_s: float = RETRY_S) -> ObjectStore:
        """Return the store whose root is this folder; see `store_at`."""
        # Imported here, since whoever keeps runs on paths needs none of it.
        from ray_ulysses.storage.object_store import ObjectStore

        return ObjectStore.at(self.location, retry_s=retry_s)

    def read_bytes(self, retry_s: float = RETRY_S) -> bytes:
        """Return the content of the file; raises FileNotFoundError if there is none."""
        return self.parent.open_store(retry_s).read_whole(self.name)

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the content of the file as text."""
        return self.read_bytes().decode(encoding)

    def is_file(self) -> bool:
        """Return whether there is such a file; raises OSError if the store does not say."""
        try:
            self.parent.open_store().look(self.name)
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Return whether there is a file in the folder; raises OSError if the store does not say."""
        return self.open_store().has_files()


Place = Path | RemotePath
"""A path, or a place in an object store."""


def place_of(location: str | os.PathLike[str] | RemotePath) -> Place:
    """Return the place that a path or a URI names.

    Raises:
        LocationError: It is a URI of no kind that is known, or it holds a secret.
    """
    if isinstance(location, RemotePath):
        return location
    where = parse_location(os.fspath(location))
    return RemotePath(where) if isinstance(where, ObjectLocation) else expand_home(where)


def store_at(place: Place, *, must_exist: bool = False, retry_s: float = RETRY_S) -> Store:
    """Return the store whose root is a directory; neither asks it anything nor creates anything.

    Args:
        place: The directory.
        must_exist: Whether a path has to be there for a write; see `LocalStore`. An object store has no directories.
        retry_s: How long a request to an object store is tried again while it is away, in seconds.
    """
    return LocalStore(place, must_exist=must_exist) if isinstance(place, Path) else place.open_store(retry_s)


def open_store(location: str | os.PathLike[str], *, retry_s: float = RETRY_S) -> Store:
    """Return the store at a location; neither asks it anything nor creates anything.

    Args:
        location: A path, or a URI: ``file://``, ``s3://bucket/prefix``, ``gs://bucket/prefix``,
            ``abfs://container@account/prefix``. Credentials, region and endpoint come from the environment;
            ``?endpoint_override=127.0.0.1:9000&scheme=http&region=us-east-1`` may name the latter two.
        retry_s: As of `store_at`.

    Raises:
        LocationError: It is none of these, or it holds a secret.
    """
    return store_at(place_of(location), retry_s=retry_s)


def node_folder(directory: Place) -> Path:
    """Return the folder for what only this node needs of a run: its directory, or a folder of the node for each URI.

    Args:
        directory: The run's directory.
    """
    if isinstance(directory, Path):
        return directory
    digest = hashlib.sha256(str(directory).encode()).hexdigest()[:12]
    return cache_folder("runs") / f"{directory.name}-{digest}"
