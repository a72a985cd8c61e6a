"""Refuses credentials in URIs of the configuration, which is stored and printed, and environment variables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ray_ulysses.errors import Problem, without_secret
from ray_ulysses.storage.location import credentials_hint

_VARIABLE = re.compile(r"(?P<name>\$\{[^{}]*\})|(?:^|/)(?P<bare>\$[A-Z_][A-Z0-9_]*)(?=/|$)")
"""``${NAME}`` anywhere, and ``$NAME`` as a folder of a path; Azure has containers such as ``$web``."""
_NODES = "in the environment of every node or in cluster.secrets_file"
_SERVER = f"set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, {_NODES}"
_POSTGRESQL = f"leave the user in it, and set PGPASSWORD {_NODES}"
_DATABASE = "give the address of an MLflow server in front of the database"


def text_problems(tree: object, path: str = "") -> Iterator[Problem]:
    """Yield a problem for each text in nested mappings and lists that holds credentials or an environment variable.

    Args:
        tree: A configuration before validation, or a part of it.
        path: Dotted path of the part.
    """
    if isinstance(tree, str):
        if (safe := without_secret(tree)) != tree:
            rule = "may not hold credentials, since it is stored with the run"
            yield Problem(path=path, value=safe, rule=rule, hint=_hint(tree, path))
        if (found := _VARIABLE.search(safe)) is not None:
            name = found["name"] or found["bare"]
            rule = f"contains {name}, and environment variables are not expanded in a configuration"
            hint = f'write its value, or pass it where a shell expands it: --set "{path}={safe}"'
            yield Problem(path=path, value=safe, rule=rule, hint=hint)
    elif isinstance(tree, Mapping | list | tuple):
        for name, part in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from text_problems(part, f"{path}.{name}" if path else str(name))


def _hint(text: str, path: str) -> str:
    scheme = text.partition("://")[0].lower()
    if path == "tracking.uri":
        return _SERVER if scheme.startswith("http") else _POSTGRESQL if scheme.startswith("postgres") else _DATABASE
    return credentials_hint(scheme) or "leave them out"
