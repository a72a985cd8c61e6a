"""Opens the store at a location, local or remote."""

from __future__ import annotations

from pathlib import Path

from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.location import RETRY_S, parse_location
from ray_ulysses.storage.store import Store


def open_store(location: str | Path, *, retry_s: float = RETRY_S) -> Store:
    """Return the store at a location; neither asks it anything nor creates anything.

    Args:
        location: A path, or a URI: ``file://``, ``s3://bucket/prefix``, ``gs://bucket/prefix``,
            ``abfs://container@account/prefix``. Credentials, region and endpoint come from the environment;
            ``?endpoint_override=127.0.0.1:9000&scheme=http&region=us-east-1`` may name the latter two.
        retry_s: How long a request to an object store is tried again while it is away or overloaded, in seconds.

    Raises:
        LocationError: It is none of these, or it holds a secret.
    """
    where = parse_location(location)
    if isinstance(where, Path):
        return LocalStore(where)
    # Imported here, since whoever keeps runs on paths needs none of it.
    from ray_ulysses.storage.object_store import ObjectStore

    return ObjectStore.at(where, retry_s=retry_s)
