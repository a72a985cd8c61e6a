"""Plants secrets in the environment of commands, and looks for them in what these leave behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

NAMES = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD",
    "RAY_AUTH_TOKEN",
)  # fmt: skip


def plant() -> dict[str, str]:
    return {name: f"planted-{uuid.uuid4().hex}" for name in NAMES}


def files_with(secrets: Mapping[str, str], *folders: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    num_read = 0
    # Ray's agents may still remove folders and files.
    walks = itertools.chain.from_iterable(map(os.walk, folders))
    for path in (Path(folder) / name for folder, _, files in walks for name in files):
        with contextlib.suppress(FileNotFoundError):
            if not path.is_file() or path.is_symlink():
                continue
            num_read += 1
            content = path.read_bytes()
            held = {name for name, value in secrets.items() if value.encode() in content}
            if held:
                found[str(path)] = held
    assert num_read > 20
    return found
