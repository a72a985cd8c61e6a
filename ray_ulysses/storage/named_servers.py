"""Tells servers that a user names, in the environment or to a command, from servers that only a run's files name.

A client signs its requests with the user's credentials, and sends session and bearer tokens along. So it connects to a
server that somebody else's files name only where the user names that server too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from urllib.parse import urlsplit

from ray_ulysses.errors import UserError, without_secret
from ray_ulysses.storage.location import ObjectLocation, parse_location
from ray_ulysses.storage.place import Place, RemotePath

TRUST_RUN = "add --trust-run if the run is yours"
"""The way out for commands that read a run."""
_PORTS = {"http": 80, "https": 443}


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
