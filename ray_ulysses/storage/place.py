"""Places of a run's files: a path, or a prefix of an object store that is read with the same few methods as a path.

A `RemotePath` has only those methods of `pathlib.Path` that read, so that code which looks for the small files of a run
needs no branch. Writers open the `Store` of the directory (`store_at`), on a path and on an object store alike.

A client signs its requests with the user's credentials, and sends session and bearer tokens along. So it connects to a
server that somebody else's files name only where the user names that server too (`refuse_server`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from ray_ulysses.errors import UserError, without_secret
from ray_ulysses.storage.block_cache import cache_folder, node_cache
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.location import RETRY_S, ObjectLocation, expand_home, parse_location

if TYPE_CHECKING:
    from ray_ulysses.storage.object_store import ObjectStore

TRUST_RUN = "add --trust-run if the run is yours"
"""The way out for commands that read a run."""
_FOLDER_RETRY_S = 5.0
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A file or a folder of an object store."""

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
        # Imported here, since runs on paths don't need it.
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
        return self.open_store().exists()


Place = Path | RemotePath
"""A path, or a place in an object store."""
FileStore: TypeAlias = "LocalStore | ObjectStore"
"""A `Store` of files at a location: it has a display name, and gives files to pyarrow and by ranges."""


def place_of(location: str | os.PathLike[str] | RemotePath) -> Place:
    """Return the place that a path or a URI names.

    Raises:
        LocationError: It is a URI of no kind that is known, or it holds a secret.
    """
    if isinstance(location, RemotePath):
        return location
    where = parse_location(os.fspath(location))
    return RemotePath(where) if isinstance(where, ObjectLocation) else expand_home(where)


def store_at(place: Place, *, must_exist: bool = False, retry_s: float = RETRY_S) -> FileStore:
    """Return the store whose root is a directory; neither asks it anything nor creates anything.

    Args:
        place: The directory.
        must_exist: Whether a path has to be there for a write; see `LocalStore`. An object store has no directories.
        retry_s: How long a request to an object store is tried again while it is away, in seconds.
    """
    return LocalStore(place, must_exist=must_exist) if isinstance(place, Path) else place.open_store(retry_s)


def open_store(location: str | os.PathLike[str], *, retry_s: float = RETRY_S) -> FileStore:
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


def open_folder(location: str | Path) -> FileStore:
    """Return the store of a folder of finished files, which are read by ranges through the node's cache of blocks.

    It waits only briefly for a storage that is away: readers have a retry policy of their own.

    Args:
        location: As of `open_store`.

    Raises:
        UserError: It is none of these, holds a secret, or can't be set up in this environment.
    """
    place = place_of(location)
    if isinstance(place, Path):
        return LocalStore(place)
    from ray_ulysses.storage.object_store import ObjectStore

    return ObjectStore.at(place.location, retry_s=_FOLDER_RETRY_S, cache=node_cache())


def node_folder(directory: Place) -> Path:
    """Return the folder for what only this node needs of a run: its directory, or a folder of the node for each URI.

    Args:
        directory: The run's directory.
    """
    if isinstance(directory, Path):
        return directory
    digest = hashlib.sha256(str(directory).encode()).hexdigest()[:12]
    return cache_folder("runs") / f"{directory.name}-{digest}"


class UnnamedServerError(UserError):
    """Only a run's files name a server."""


def refuse_server(location: str, setting: str, named: Iterable[str | Place], way_out: str = TRUST_RUN) -> None:
    """Refuse a location that a run's files give, on a server that the user does not name.

    A path is never refused, nor is a bucket on the cloud's own servers or on the server of the environment.

    Args:
        location: The path or URI.
        setting: Where it stands, for the error.
        named: Locations that the user gives: their servers are the user's.
        way_out: How to allow it, beside the environment.

    Raises:
        UnnamedServerError: Only the run's files name its server.
    """
    where = parse_location(location)
    if not isinstance(where, ObjectLocation) or (server := where.server) is None:
        return
    given = [place.location if isinstance(place, RemotePath) else parse_location(place) for place in named]
    own = [*_servers_of_environment(where), *(one.server for one in given if isinstance(one, ObjectLocation))]
    if origin_of(server) in {origin_of(one) for one in own if one}:
        return
    ways = [way_out]
    if where.provider == "s3":
        ways.insert(0, f"set AWS_ENDPOINT_URL_S3={server}")
    elif where.provider == "az" and where.option("blob_storage_authority") is None:
        ways.insert(0, f"set AZURE_STORAGE_ACCOUNT_NAME={where.account or where.option('account_name')}")
    raise UnnamedServerError(
        f"{setting}={without_secret(location)!r}: only the run names the server {server}, which would get your "
        f"credentials; {', or '.join(ways)}"
    )


def origin_of(url: str) -> tuple[str, str, int | None]:
    """Return the scheme, the host and the port of a URL (pure)."""
    try:
        parts = urlsplit(url)
        scheme = parts.scheme.lower()
        return scheme, (parts.hostname or "").rstrip("."), parts.port or _PORTS.get(scheme)
    except ValueError:
        # A variable of the environment with a port that is not a number.
        return url, "", None


def _servers_of_environment(location: ObjectLocation) -> list[str | None]:
    """Return the servers that the environment names for a provider."""
    if location.provider == "s3":
        return [os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")]
    if location.provider == "gs":
        emulator = os.environ.get("STORAGE_EMULATOR_HOST")
        return [emulator if emulator is None or "://" in emulator else f"http://{emulator}"]
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    return [os.environ.get("AZURE_STORAGE_ENDPOINT"), account and f"https://{account}.blob.core.windows.net"]
