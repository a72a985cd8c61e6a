"""Refuses credentials in URIs of the configuration, which is stored with the run and printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ray_ulysses.errors import Problem, without_secret
from ray_ulysses.storage.location import credentials_hint

_NODES = "in the environment of every node or in cluster.secrets_file"
_SERVER = f"set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, {_NODES}"
_POSTGRESQL = f"leave the user in it, and set PGPASSWORD {_NODES}"
_DATABASE = "give the address of an MLflow server in front of the database"


def credential_problems(tree: object, path: str = "") -> Iterator[Problem]:
    """Yield a problem for each text in nested mappings and lists that contains a URI with credentials.

    Args:
        tree: A configuration before validation, or a part of it.
        path: Dotted path of the part.
    """
    if isinstance(tree, str) and (safe := without_secret(tree)) != tree:
        rule = "may not hold credentials, since it is stored with the run"
        yield Problem(path=path, value=safe, rule=rule, hint=_hint(tree, path))
    elif isinstance(tree, Mapping | list | tuple):
        for name, part in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from credential_problems(part, f"{path}.{name}" if path else str(name))


def _hint(text: str, path: str) -> str:
    scheme = text.partition("://")[0].lower()
    if path == "tracking.uri":
        return _SERVER if scheme.startswith("http") else _POSTGRESQL if scheme.startswith("postgres") else _DATABASE
    return credentials_hint(scheme) or "leave them out"
