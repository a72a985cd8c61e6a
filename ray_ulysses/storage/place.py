"""Opens the store at a `Place`: a path, or a location in an object store.

A client signs its requests with the user's credentials and may send session or bearer tokens. A server that is
specified only by a run's files, which another user may have written, could steal them. `refuse_server` therefore
requires the user to specify the server, too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
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
"""Default suggested fix in `refuse_server` errors, for commands that read a run."""
_FOLDER_RETRY_S = 5.0
_PORTS = {"http": 80, "https": 443}


Place = Path | ObjectLocation
"""A path, or the location of a folder or file in an object store."""
FileStore: TypeAlias = "LocalStore | ObjectStore"
"""A `Store` that also has a display name and can open files for pyarrow and for random access."""


def place_of(location: str | os.PathLike[str] | ObjectLocation) -> Place:
    """Parse a path or URI, expanding a leading ``~``.

    Raises:
        LocationError: The URI is invalid or contains a secret.
    """
    if isinstance(location, ObjectLocation):
        return location
    where = parse_location(os.fspath(location))
    return where if isinstance(where, ObjectLocation) else expand_home(where)


def open_store(
    location: str | Place, *, must_exist: bool = False, retry_s: float = RETRY_S, is_cached: bool = False
) -> FileStore:
    """Return a store rooted at a folder, without sending a request or creating the folder.

    Args:
        location: A path, or a URI: ``file://``, ``s3://bucket/prefix``, ``gs://bucket/prefix``,
            ``abfs://container@account/prefix``. Credentials, region and endpoint come from the environment. URI options
            such as ``?endpoint_override=127.0.0.1:9000&scheme=http&region=us-east-1`` override region and endpoint.
        must_exist: Whether writes fail if a path's directory is missing; see `LocalStore`. Ignored for object stores.
        retry_s: Maximum time to retry requests to an unreachable object store, in seconds.
        is_cached: Whether `ObjectStore.open_ranges` uses the node's block cache.

    Raises:
        UserError: The location is invalid or contains a secret, or the client can't be created.
    """
    place = place_of(location)
    if isinstance(place, Path):
        return LocalStore(place, must_exist=must_exist)
    # Imported here because runs with local paths don't need it.
    from ray_ulysses.storage.object_store import ObjectStore

    return ObjectStore(place, retry_s=retry_s, cache=node_cache() if is_cached else None)


def open_folder(location: str | Path) -> FileStore:
    """Return a cached store for reading a folder of complete files; see `open_store`.

    Requests to an unreachable store are retried only briefly, since readers have their own retry policy.
    """
    return open_store(location, retry_s=_FOLDER_RETRY_S, is_cached=True)


def is_file(place: Place) -> bool:
    """Return whether a file exists; raise OSError if the object store does not respond."""
    if isinstance(place, Path):
        return place.is_file()
    try:
        open_store(place.parent).size(place.name)
    except FileNotFoundError:
        return False
    return True


def node_folder(directory: Place) -> Path:
    """Return the folder of a run's node-local files: the run's ``directory``, or a cache folder for an object store."""
    if isinstance(directory, Path):
        return directory
    digest = hashlib.sha256(str(directory).encode()).hexdigest()[:12]
    return cache_folder("runs") / f"{directory.name}-{digest}"


class UnnamedServerError(UserError):
    """A server is specified only by a run's files."""


def refuse_server(location: str, setting: str, named: Iterable[str | Place], way_out: str = TRUST_RUN) -> None:
    """Refuse a location from a run's files if it is on a server that the user has not specified.

    Paths, buckets on the provider's default servers, and buckets on a server from the environment are always accepted.

    Args:
        location: The path or URI from the run's files.
        setting: The setting that contains the location, for the error.
        named: Locations that the user has specified. Their servers are accepted.
        way_out: A way to accept the server, in addition to setting an environment variable.

    Raises:
        UnnamedServerError: The location's server is specified only by the run's files.
    """
    where = parse_location(location)
    if not isinstance(where, ObjectLocation) or (server := where.server) is None:
        return
    given = map(place_of, named)
    own = [*_servers_of_environment(where), *(one.server for one in given if isinstance(one, ObjectLocation))]
    if origin_of(server) in {origin_of(one) for one in own if one}:
        return
    ways = [way_out]
    if where.provider == "s3":
        ways.insert(0, f"set AWS_ENDPOINT_URL_S3={server}")
    elif where.provider == "az" and where.option("blob_storage_authority") is None:
        ways.insert(0, f"set AZURE_STORAGE_ACCOUNT_NAME={where.account or where.option('account_name')}")
    raise UnnamedServerError(
        f"{setting}={without_secret(location)!r}: only the run's files specify the server {server}, which would "
        f"receive your credentials; {', or '.join(ways)}"
    )


def origin_of(url: str) -> tuple[str, str, int | None]:
    """Return the scheme, host and port of a URL."""
    try:
        parts = urlsplit(url)
        scheme = parts.scheme.lower()
        return scheme, (parts.hostname or "").rstrip("."), parts.port or _PORTS.get(scheme)
    except ValueError:
        # The port in an environment variable is not a number.
        return url, "", None


def _servers_of_environment(location: ObjectLocation) -> list[str | None]:
    if location.provider == "s3":
        return [os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")]
    if location.provider == "gs":
        emulator = os.environ.get("STORAGE_EMULATOR_HOST")
        return [emulator if emulator is None or "://" in emulator else f"http://{emulator}"]
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    return [os.environ.get("AZURE_STORAGE_ENDPOINT"), account and f"https://{account}.blob.core.windows.net"]
