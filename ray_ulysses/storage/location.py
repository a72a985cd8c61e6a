"""Locations of stores: a path, or the URI of an object store in the syntax of `pyarrow.fs`.

A URI is written into ``config.yaml`` and shown in MLflow, so it may not hold a secret: credentials come from the
environment, as the cloud's own tools read them.

The options behind ``?`` are spelled as in https://arrow.apache.org/docs/python/filesystems.html.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from ray_ulysses.errors import UserError, names_secret, without_secret

RETRY_S = 60.0
SQLITE = "sqlite:///"
"""The beginning of an SQLite database's URI; a path follows."""

Provider = Literal["s3", "gs", "az"]

_PROVIDERS: dict[str, Provider] = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "abfs": "az",
    "abfss": "az",
    "az": "az",
}
_OPTIONS: dict[Provider, frozenset[str]] = {
    "s3": frozenset({"endpoint_override", "force_virtual_addressing", "region", "scheme"}),
    "gs": frozenset({"endpoint_override", "scheme"}),
    "az": frozenset({"account_name", "blob_storage_authority", "enable_tls"}),
}
_VALUES = {
    "scheme": ("http", "https"),
    "force_virtual_addressing": ("true", "false"),
    "enable_tls": ("true", "false"),
}
_CREDENTIALS: dict[Provider, str] = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment of every node or in "
    "cluster.secrets_file, or give the nodes a role",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS in the environment of every node or in cluster.secrets_file, or give the "
    "nodes a service account",
    "az": "set AZURE_STORAGE_ACCOUNT_KEY in the environment of every node or in cluster.secrets_file, or give the "
    "nodes a managed identity",
}
_KNOWN = "a path, file://, s3://bucket/prefix, gs://bucket/prefix or abfs://container@account/prefix"
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):(/{1,2})")
# Much of what is outside of these ends obstore 0.12.1 in a Rust panic, which is no `Exception`.
_BUCKET = re.compile(r"[A-Za-z0-9$_][A-Za-z0-9$._-]*")
_WORD = re.compile(r"[A-Za-z0-9._-]+")
_HOST = re.compile(
    r"(?:https?://)?(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::(?P<port>[0-9]{1,5}))?(?:/[A-Za-z0-9._~/-]*)?"
)


class LocationError(UserError):
    """A location that can't be used: how it is shown, without secrets, the rule that it breaks, and what to write."""

    def __init__(self, shown: str, rule: str, hint: str) -> None:
        self.shown, self.rule, self.hint = shown, rule, hint
        super().__init__(f"storage {shown!r}: {rule}; {hint}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectLocation:
    """A folder or a file of an object store."""

    provider: Provider
    bucket: str
    """The bucket, or Azure's container."""
    prefix: str
    """The folder in it, without slashes at its ends; empty for the whole bucket."""
    account: str | None
    """Azure's storage account, if the URI names it."""
    options: tuple[tuple[str, str], ...]
    """Query options, in their order."""

    def option(self, name: str) -> str | None:
        """Return an option's value, or None if it is not given."""
        return dict(self.options).get(name)

    @property
    def server(self) -> str | None:
        """Return the URL of the server that the URI itself names; None where the environment or the cloud does."""
        endpoint = self.option("endpoint_override")
        if endpoint is not None:
            return endpoint if "://" in endpoint else f"{self.option('scheme') or 'https'}://{endpoint}"
        account, authority = self.account or self.option("account_name"), self.option("blob_storage_authority")
        if authority is None:
            return account and f"https://{account}.blob.core.windows.net"
        scheme = "http" if self.option("enable_tls") == "false" else "https"
        return f"{scheme}://{account or ''}{authority}" if authority[0] == "." else f"{scheme}://{authority}"

    @property
    def display_name(self) -> str:
        """Its name in errors: without options, and so without hosts."""
        return f"{self.provider}://{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def name(self) -> str:
        """The last part of it, as of a path."""
        return self.prefix.rpartition("/")[2]

    @property
    def parent(self) -> ObjectLocation:
        """The folder that holds it."""
        return replace(self, prefix=self.prefix.rpartition("/")[0])

    def __truediv__(self, name: str) -> ObjectLocation:
        """Return a file or a folder in this folder; options stay where they belong."""
        return replace(self, prefix=f"{self.prefix}/{name}" if self.prefix else name)

    def absolute(self) -> ObjectLocation:
        """Return itself: a URI means the same everywhere."""
        return self

    def __str__(self) -> str:
        scheme = "abfs" if self.provider == "az" else self.provider
        where = f"{self.bucket}@{self.account}" if self.account else self.bucket
        folder = f"/{quote(self.prefix)}" if self.prefix else ""
        query = f"?{urlencode(self.options)}" if self.options else ""
        return f"{scheme}://{where}{folder}{query}"


def parse_location(location: str | Path) -> Path | ObjectLocation:
    """Return the path or the folder of an object store that a location names (pure).

    Raises:
        LocationError: No store can be opened there, or it holds a secret, which the text does not show.
    """
    text = str(location)
    found = _SCHEME.match(text)
    if not text:
        raise LocationError(text, "names nothing", f"give {_KNOWN}")
    if found is None:
        return Path(text)
    scheme, slashes = found[1].lower(), found[2]
    if slashes == "/":
        # Path("s3://bucket") has lost a slash by the time it arrives here.
        raise LocationError(
            without_secret(text), "has one slash behind the scheme", f"write {scheme}:// and pass it as text"
        )
    if scheme == "file":
        return _file_path(text)
    if scheme not in _PROVIDERS:
        raise LocationError(without_secret(text), f"{scheme}:// is not a storage", f"give {_KNOWN}")
    return _object_location(text, scheme)


def credentials_hint(scheme: str) -> str | None:
    """Return where to put the credentials of a storage, which its URI may not hold; None for another scheme."""
    provider = _PROVIDERS.get(scheme)
    return None if provider is None else _CREDENTIALS[provider]


def sqlite_path(uri: str) -> Path | None:
    """Return the file of an SQLite database, without the options behind ``?``; None for another URI."""
    return Path(uri.removeprefix(SQLITE).partition("?")[0]) if uri.startswith(SQLITE) else None


def is_clear_text(url: str) -> bool:
    """Return whether a URL uses plain HTTP to another machine (pure)."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    if parts.scheme != "http" or host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def absolute_location(location: str, base: Path) -> str:
    """Return a location that means the same in every working directory; a URI is returned as it is.

    Args:
        location: A path or URI.
        base: Absolute directory that relative paths start from.
    """
    return location if _SCHEME.match(location) else str(base / expand_home(location))


def expand_home(path: str | Path) -> Path:
    """Return a path with the home directory in the place of a leading ``~``.

    Raises:
        UserError: It names the home directory of a user that this machine does not know.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{path}: names the home directory of a user that this machine does not know; write an absolute path"
        ) from None


def _file_path(text: str) -> Path:
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        rule = f"names the host {parts.netloc.rpartition('@')[2]!r}"
        raise LocationError(without_secret(text), rule, "write three slashes: file:///mnt/shared/runs")
    if not parts.path or parts.query or parts.fragment:
        raise LocationError(text, "is not the URI of a path", "write file:///mnt/shared/runs")
    return Path(unquote(parts.path))


def _object_location(text: str, scheme: str) -> ObjectLocation:
    parts, provider = urlsplit(text), _PROVIDERS[scheme]
    shown = without_secret(_without_unknown_values(text, _OPTIONS[provider]))
    user, at, host = parts.netloc.rpartition("@")
    account = None
    # A secret may hold a slash, which ends what is taken for the host.
    is_cut = ":" in host and "@" in parts.path
    if is_cut or (at and (":" in user or provider != "az")):
        raise LocationError(shown, "may not hold credentials, since it is stored with the run", _CREDENTIALS[provider])
    if at:
        host, account = unquote(user), host.partition(".")[0]
    if not host or ":" in host:
        raise LocationError(shown, "names no bucket", f"write {scheme}://bucket/prefix")
    if not _BUCKET.fullmatch(host) or (account is not None and not _WORD.fullmatch(account)):
        raise LocationError(shown, "has an invalid name of a bucket or an account", "correct the name")
    if parts.fragment:
        raise LocationError(shown, "has a '#'", "leave it out")
    prefix = unquote(parts.path).strip("/")
    if prefix and not {"", ".", ".."}.isdisjoint(prefix.split("/")):
        raise LocationError(shown, "has an empty or dotted folder", "write every folder by its name")
    options = tuple(parse_qsl(parts.query, keep_blank_values=True))
    if wrong := _wrong_option(options, provider):
        raise LocationError(shown, *wrong)
    return ObjectLocation(provider=provider, bucket=host, prefix=prefix, account=account, options=options)


def _without_unknown_values(text: str, known: Collection[str]) -> str:
    """Return a URI without the values of unknown options, any of which may be a secret."""
    head, mark, query = text.partition("?")
    pairs = (pair.partition("=") for pair in query.split("&"))
    shown = (name + eq + (value if name in known else "***" if value else "") for name, eq, value in pairs)
    return head + mark + "&".join(shown)


def _wrong_option(options: tuple[tuple[str, str], ...], provider: Provider) -> tuple[str, str] | None:
    """Return the rule that the options break and the way out; each must be known and given once."""
    known, given = _OPTIONS[provider], dict(options)
    for name, value in options:
        if name not in known and names_secret(name):
            return f"may not hold {name}, since it is stored with the run", _CREDENTIALS[provider]
        if name not in known:
            return f"has the unknown option {name!r}", f"use {', '.join(sorted(known))}"
        wrong = f"gives {name} as {value!r}"
        if not value or value not in _VALUES.get(name, (value,)):
            return wrong, f"give {' or '.join(_VALUES.get(name, ('a value',)))}"
        if name in ("region", "account_name") and not _WORD.fullmatch(value):
            return wrong, "give its name: letters, digits and '-'"
        if name not in ("endpoint_override", "blob_storage_authority"):
            continue
        if "@" in value:
            return f"may not hold credentials in {name}, since it is stored with the run", _CREDENTIALS[provider]
        # Azure's ".blob.local" is what follows the account's name.
        found = _HOST.fullmatch(value.removeprefix("."))
        if found is None or int(found["port"] or 1) not in range(1, 1 << 16) or not _is_host(found["host"]):
            return f"{wrong}, which is not a host", "give host:port, such as minio:9000"
        if given.get("force_virtual_addressing") == "true" and (found["host"][0] == "[" or _is_address(found["host"])):
            rule = f"{wrong}, an address, which takes no bucket before it"
            return rule, "give the host by its name, or leave force_virtual_addressing out"
    endpoint = given.get("endpoint_override", "")
    if given.get("scheme") != "http" and is_clear_text(endpoint):
        rule = f"gives endpoint_override as {endpoint!r}, where credentials travel in clear text"
        return rule, "give https://, or add scheme=http for a network that nobody else reads"
    if len(given) < len(options):
        return "gives an option twice", "give it once"
    return None


def _is_host(host: str) -> bool:
    """Return whether a host is a name or a valid address; one that ends in a number can only be an address."""
    if host.startswith("["):
        return _is_address(host[1:-1], ipaddress.IPv6Address)
    labels = host.removesuffix(".").split(".")
    return all(labels) and (_is_address(host) or not re.fullmatch(r"\d+|0[xX][0-9a-fA-F]*", labels[-1]))


def _is_address(host: str, kind: Callable[[str], object] = ipaddress.IPv4Address) -> bool:
    try:
        kind(host)
    except ValueError:
        return False
    return True
