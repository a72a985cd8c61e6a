"""Refuses credentials in the configuration, which is stored and printed, and lists the credential variables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ray_ulysses.errors import Problem, without_secret
from ray_ulysses.storage.location import credentials_hint

CREDENTIALS = frozenset(
    {
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
        *("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY"),
        *("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY"),
        *("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_TOKEN", "AZURE_STORAGE_CONNECTION_STRING"),
        *("AZURE_STORAGE_CLIENT_ID", "AZURE_STORAGE_CLIENT_SECRET", "AZURE_STORAGE_TENANT_ID"),
        *("AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID"),
        *("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
        *("DATABRICKS_TOKEN", "DATABRICKS_CLIENT_ID", "DATABRICKS_CLIENT_SECRET"),
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "PGPASSWORD", "WANDB_API_KEY"),
    }
)
"""Environment variables that ``cluster.secrets_file`` may set without an entry in ``cluster.secrets_names``. None of
them selects a program to run, and only the Azure account name affects which server receives credentials."""
_STEERS_PROGRAMS = re.compile(
    r"(LD|DYLD|OPENSSL|RAY)_.*|PYTHON.*|.*_PROXY|PATH|HOME|SHELL|IFS|ENV|BASH_ENV|GCONV_PATH|GLIBC_TUNABLES",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"(?P<name>\$\{[^{}]*\}?)|(?:^|/)(?P<bare>\$[A-Z_][A-Z0-9_]*)(?=/|$)")
"""Matches ``${NAME}`` anywhere, and an uppercase ``$NAME`` as a path component; Azure has a lowercase ``$web``."""
_NODES = "in the environment of every node or in cluster.secrets_file"
_SERVER = f"set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, {_NODES}"
_POSTGRESQL = f"keep only the user name in it, and set PGPASSWORD {_NODES}"
_DATABASE = "use the address of an MLflow server in front of the database"


def steers_programs(name: str) -> bool:
    """Return whether an environment variable can change which code a process runs or which host it connects through."""
    return _STEERS_PROGRAMS.fullmatch(name) is not None


def text_problems(tree: object, path: str = "") -> Iterator[Problem]:
    """Yield a problem for each string in a nested tree that contains a credential or an environment variable."""
    if isinstance(tree, str):
        if (safe := without_secret(tree)) != tree:
            rule = "may not contain credentials, since it is stored with the run"
            yield Problem(path=path, value=safe, rule=rule, hint=_hint(tree, path))
        if (found := _VARIABLE.search(safe)) is not None:
            name = found["name"] or found["bare"]
            rule = f"contains {name}, but only ${{NAME}} and ${{NAME:-default}} are expanded"
            hint = "write the value itself, or refer to the variable in one of these forms"
            yield Problem(path=path, value=safe, rule=rule, hint=hint)
    elif isinstance(tree, Mapping | list | tuple):
        for name, part in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from text_problems(part, f"{path}.{name}" if path else str(name))


def _hint(text: str, path: str) -> str:
    scheme = text.partition("://")[0].lower()
    if path == "tracking.uri":
        return _SERVER if scheme.startswith("http") else _POSTGRESQL if scheme.startswith("postgres") else _DATABASE
    return credentials_hint(scheme) or "leave them out"
