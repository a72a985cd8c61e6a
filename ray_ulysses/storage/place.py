"""Places of a run's files, a path or a prefix of an object store, and how the store at a place is opened.

A client signs its requests with the user's credentials, and sends session and bearer tokens along. So it connects to a
server that somebody else's files name only where the user names that server too (`refuse_server`).
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
"""The way out for commands that read a run."""
_FOLDER_RETRY_S = 5.0
_PORTS = {"http": 80, "https": 443}


Place = Path | ObjectLocation
"""A path, or a folder or a file of an object store."""
FileStore: TypeAlias = "LocalStore | ObjectStore"
"""A `Store` of files at a location: it has a display name, and gives files to pyarrow and by ranges."""


def place_of(location: str | os.PathLike[str] | ObjectLocation) -> Place:
    """Return the place that a path or a URI names.

    Raises:
        LocationError: The URI's scheme is unknown, or it holds a secret.
    """
    if isinstance(location, ObjectLocation):
        return location
    where = parse_location(os.fspath(location))
    return where if isinstance(where, ObjectLocation) else expand_home(where)


def open_store(
    location: str | Place, *, must_exist: bool = False, retry_s: float = RETRY_S, is_cached: bool = False
) -> FileStore:
    """Return the store whose root is a folder; sends no request and creates nothing.

    Args:
        location: A path, or a URI: ``file://``, ``s3://bucket/prefix``, ``gs://bucket/prefix``,
            ``abfs://container@account/prefix``. Credentials, region and endpoint come from the environment;
            ``?endpoint_override=127.0.0.1:9000&scheme=http&region=us-east-1`` may name the latter two.
        must_exist: Whether a path has to be there for a write; see `LocalStore`. An object store has no directories.
        retry_s: How long a request to an object store is tried again while it is away, in seconds.
        is_cached: Whether files of an object store that are read by ranges go through the node's cache of blocks.

    Raises:
        UserError: It is none of these, holds a secret, or can't be set up in this environment.
    """
    place = place_of(location)
    if isinstance(place, Path):
        return LocalStore(place, must_exist=must_exist)
    # Imported here, since runs on paths don't need it.
    from ray_ulysses.storage.object_store import ObjectStore

    return ObjectStore(place, retry_s=retry_s, cache=node_cache() if is_cached else None)


def open_folder(location: str | Path) -> FileStore:
    """Return the store of a folder of finished files, as `open_store` does.

    It waits only briefly for a storage that is away: readers have a retry policy of their own.
    """
    return open_store(location, retry_s=_FOLDER_RETRY_S, is_cached=True)


def is_file(place: Place) -> bool:
    """Return whether there is such a file; raises OSError if an object store does not say."""
    if isinstance(place, Path):
        return place.is_file()
    try:
        open_store(place.parent).size(place.name)
    except FileNotFoundError:
        return False
    return True


def node_folder(directory: Place) -> Path:
    """Return the folder for a run's files that only this node needs: its directory, or a folder of the node per URI.

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
        setting: The setting that holds it, for the error.
        named: Locations that the user gives: their servers are the user's.
        way_out: How to allow it, beside the environment.

    Raises:
        UnnamedServerError: Only the run's files name its server.
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
