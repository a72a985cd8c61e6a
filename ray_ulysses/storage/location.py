"""Parses store locations: paths, and object store URIs in `pyarrow.fs` syntax.

URIs are stored in ``config.yaml`` and shown in MLflow, so they must not contain secrets. Credentials come from the
environment variables that the cloud providers' own tools read.

The query options are those of https://arrow.apache.org/docs/python/filesystems.html.
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
"""URI prefix of an SQLite database, followed by a path."""

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
# Many names that these patterns exclude cause a Rust panic in obstore 0.12.1, which is not an `Exception`.
_BUCKET = re.compile(r"[A-Za-z0-9$_][A-Za-z0-9$._-]*")
_WORD = re.compile(r"[A-Za-z0-9._-]+")
_HOST = re.compile(
    r"(?:https?://)?(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::(?P<port>[0-9]{1,5}))?(?:/[A-Za-z0-9._~/-]*)?"
)


class LocationError(UserError):
    """An invalid location.

    Args:
        shown: The location with secrets redacted.
        rule: The violated rule.
        hint: The suggested fix.
    """

    def __init__(self, shown: str, rule: str, hint: str) -> None:
        self.shown, self.rule, self.hint = shown, rule, hint
        super().__init__(f"storage {shown!r}: {rule}; {hint}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectLocation:
    """The location of a folder or file in an object store."""

    provider: Provider
    bucket: str
    """Name of the bucket, or of the Azure container."""
    prefix: str
    """Path of the folder or file in the bucket, without leading or trailing slashes; empty for the bucket's root."""
    account: str | None
    """Azure storage account, if the URI contains one before the path."""
    options: tuple[tuple[str, str], ...]
    """Query options in URI order."""

    def option(self, name: str) -> str | None:
        """Return an option's value, or None if the URI does not set the option."""
        return dict(self.options).get(name)

    @property
    def server(self) -> str | None:
        """URL of the server, or None if the URI leaves the choice to the environment or the provider's default."""
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
        """The URI without options, and therefore without hosts, for errors."""
        return f"{self.provider}://{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def name(self) -> str:
        """The last path component."""
        return self.prefix.rpartition("/")[2]

    @property
    def parent(self) -> ObjectLocation:
        """The parent folder."""
        return replace(self, prefix=self.prefix.rpartition("/")[0])

    def __truediv__(self, name: str) -> ObjectLocation:
        """Return the location of a file or folder in this folder, with the same options."""
        return replace(self, prefix=f"{self.prefix}/{name}" if self.prefix else name)

    def absolute(self) -> ObjectLocation:
        """Return the location itself, since a URI does not depend on the working directory."""
        return self

    def __str__(self) -> str:
        scheme = "abfs" if self.provider == "az" else self.provider
        where = f"{self.bucket}@{self.account}" if self.account else self.bucket
        folder = f"/{quote(self.prefix)}" if self.prefix else ""
        query = f"?{urlencode(self.options)}" if self.options else ""
        return f"{scheme}://{where}{folder}{query}"


def parse_location(location: str | Path) -> Path | ObjectLocation:
    """Parse a path or URI.

    Raises:
        LocationError: The location is invalid or contains a secret. The message redacts secrets.
    """
    text = str(location)
    found = _SCHEME.match(text)
    if not text:
        raise LocationError(text, "is empty", f"use {_KNOWN}")
    if found is None:
        return Path(text)
    scheme, slashes = found[1].lower(), found[2]
    if slashes == "/":
        # Path("s3://bucket") removes a slash.
        hint = f"write {scheme}:// and pass the location as a string"
        raise LocationError(without_secret(text), "has only one slash after the scheme", hint)
    if scheme == "file":
        return _file_path(text)
    if scheme not in _PROVIDERS:
        raise LocationError(without_secret(text), f"{scheme}:// is not a supported scheme", f"use {_KNOWN}")
    return _object_location(text, scheme)


def credentials_hint(scheme: str) -> str | None:
    """Return a hint on how to set the credentials for a URI scheme, or None if no object store uses the scheme."""
    provider = _PROVIDERS.get(scheme)
    return None if provider is None else _CREDENTIALS[provider]


def sqlite_path(uri: str) -> Path | None:
    """Return the file path in an SQLite URI, without the query options, or None for any other URI."""
    return Path(uri.removeprefix(SQLITE).partition("?")[0]) if uri.startswith(SQLITE) else None


def is_clear_text(url: str) -> bool:
    """Return whether a URL points to another machine over plain HTTP."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    if parts.scheme != "http" or host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def absolute_location(location: str, base: Path) -> str:
    """Return a path as an absolute path. A URI is returned unchanged.

    Args:
        location: A path or URI.
        base: The absolute directory to which relative paths refer.
    """
    return location if _SCHEME.match(location) else str(base / expand_home(location))


def expand_home(path: str | Path) -> Path:
    """Replace a leading ``~`` or ``~user`` with the home directory.

    Raises:
        UserError: The user does not exist on this machine.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{path}: refers to the home directory of a user that does not exist on this machine; use an absolute path"
        ) from None


def _file_path(text: str) -> Path:
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        rule = f"contains the host {parts.netloc.rpartition('@')[2]!r}"
        raise LocationError(without_secret(text), rule, "use three slashes: file:///mnt/shared/runs")
    if not parts.path or parts.query or parts.fragment:
        raise LocationError(text, "is not a plain file URI", "use the form file:///mnt/shared/runs")
    return Path(unquote(parts.path))


def _object_location(text: str, scheme: str) -> ObjectLocation:
    parts, provider = urlsplit(text), _PROVIDERS[scheme]
    shown = without_secret(_without_unknown_values(text, _OPTIONS[provider]))
    user, at, host = parts.netloc.rpartition("@")
    account = None
    # A secret may contain a slash. Then urlsplit ends the host inside the secret, and the '@' is in the path.
    is_cut = ":" in host and "@" in parts.path
    if is_cut or (at and (":" in user or provider != "az")):
        rule = "must not contain credentials, since the location is stored with the run"
        raise LocationError(shown, rule, _CREDENTIALS[provider])
    if at:
        host, account = unquote(user), host.partition(".")[0]
    if not host or ":" in host:
        raise LocationError(shown, "contains no bucket", f"use the form {scheme}://bucket/prefix")
    if not _BUCKET.fullmatch(host) or (account is not None and not _WORD.fullmatch(account)):
        raise LocationError(shown, "contains an invalid bucket or account name", "correct the name")
    if parts.fragment:
        raise LocationError(shown, "contains a '#'", "remove it")
    prefix = unquote(parts.path).strip("/")
    if prefix and not {"", ".", ".."}.isdisjoint(prefix.split("/")):
        raise LocationError(shown, "contains an empty, '.' or '..' folder name", "remove it")
    options = tuple(parse_qsl(parts.query, keep_blank_values=True))
    if wrong := _wrong_option(options, provider):
        raise LocationError(shown, *wrong)
    return ObjectLocation(provider=provider, bucket=host, prefix=prefix, account=account, options=options)


def _without_unknown_values(text: str, known: Collection[str]) -> str:
    """Redact the values of unknown options in a URI, since any of them may be a secret."""
    head, mark, query = text.partition("?")
    pairs = (pair.partition("=") for pair in query.split("&"))
    shown = (name + eq + (value if name in known else "***" if value else "") for name, eq, value in pairs)
    return head + mark + "&".join(shown)


def _wrong_option(options: tuple[tuple[str, str], ...], provider: Provider) -> tuple[str, str] | None:
    """Return the rule that the options violate and a suggested fix, or None if all options are valid."""
    known, given = _OPTIONS[provider], dict(options)
    for name, value in options:
        if name not in known and names_secret(name):
            return f"must not contain {name}, since the location is stored with the run", _CREDENTIALS[provider]
        if name not in known:
            return f"has the unknown option {name!r}", f"use {', '.join(sorted(known))}"
        wrong = f"has the invalid option {name}={value!r}"
        if not value or value not in _VALUES.get(name, (value,)):
            return wrong, f"set it to {' or '.join(_VALUES.get(name, ('a value',)))}"
        if name in ("region", "account_name") and not _WORD.fullmatch(value):
            return wrong, "use a name of letters, digits and '-'"
        if name not in ("endpoint_override", "blob_storage_authority"):
            continue
        if "@" in value:
            rule = f"must not contain credentials in {name}, since the location is stored with the run"
            return rule, _CREDENTIALS[provider]
        # An Azure authority such as ".blob.local" is appended to the account name.
        found = _HOST.fullmatch(value.removeprefix("."))
        if found is None or int(found["port"] or 1) not in range(1, 1 << 16) or not _is_host(found["host"]):
            return f"{wrong}, which is not a host", "use host:port, such as minio:9000"
        if given.get("force_virtual_addressing") == "true" and (found["host"][0] == "[" or _is_address(found["host"])):
            rule = f"{wrong}: force_virtual_addressing puts the bucket before the host, which can't be an address"
            return rule, "use a host name, or remove force_virtual_addressing"
    endpoint = given.get("endpoint_override", "")
    if given.get("scheme") != "http" and is_clear_text(endpoint):
        rule = f"has endpoint_override={endpoint!r}, which would send credentials in clear text"
        return rule, "use https://, or add scheme=http if the network is private"
    if len(given) < len(options):
        return "contains an option twice", "remove one of them"
    return None


def _is_host(host: str) -> bool:
    """Return whether a host is a valid host name or IP address. A host that ends with a number must be an address."""
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
