"""Repositories of the Hugging Face hub. One request finds out whether the hub answers, before a library retries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ray_ulysses.errors import UserError
from ray_ulysses.storage.location import expand_home

Kind = Literal["model", "dataset"]
_ANSWER_S = 5.0
_TOO_MANY, _BROKEN = 429, 500
_KINDS: dict[Kind, str] = {"model": "model", "dataset": "data set"}
_PROBED = {"model": "config.json", "dataset": "README.md"}


def hub_folder(name: str | Path, setting: str, files: Sequence[str], hint: str) -> Path:
    """Return a directory, or the cached copy of the model repository of that id with some of its files.

    Args:
        name: The directory or the id.
        setting: The setting with its value, for errors.
        files: Patterns of the repository's files to fetch; files in folders are left out. While the hub does not
            answer, its cache is used if the first of them is there.
        hint: What to give instead.

    Raises:
        UserError: It is neither a directory nor an id of which the hub, or its cache, has the files.
    """
    if (directory := expand_home(name)).is_dir():
        return directory
    refused = hub_refusal(str(name))
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    if refused == "" or (refused and not isinstance(try_to_load_from_cache(str(name), files[0]), str)):
        raise UserError(f"{setting}: no such directory{refused}; {hint}")

    class Silent(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

    try:
        found = snapshot_download(
            str(name),
            allow_patterns=[*files],
            ignore_patterns="*/*",
            local_files_only=refused is not None,
            tqdm_class=Silent,
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{setting}: could not be fetched from the hub ({error}); {hint}") from error
    return Path(found)


def is_id(name: str) -> bool:
    """Return whether a text can be the id of a repository: ``NAME`` or ``OWNER/NAME``, and not a path."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def hub_refusal(name: str, kind: Kind = "model") -> str | None:
    """Return why the hub does not give a repository, as a clause; None if it does, empty for a directory or a path."""
    if expand_home(name).is_dir() or not is_id(name):
        return ""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return f", and with HF_HUB_OFFLINE=1 only the hub's cache is used, which has no {_KINDS[kind]} of this id"
    return _refusal(constants.ENDPOINT, name, kind)


@cache
def _refusal(endpoint: str, name: str, kind: Kind) -> str | None:
    """Ask the hub, once in a process: every request to a hub behind a firewall takes the whole timeout."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
    )

    hub, what = f"the hub at {endpoint}", _KINDS[kind]
    try:
        get_hf_file_metadata(hf_hub_url(name, _PROBED[kind], repo_type=kind, endpoint=endpoint), timeout=_ANSWER_S)
    except EntryNotFoundError:
        return None
    except GatedRepoError:
        return f", and {hub} gives this {what} only to accounts that accepted its terms (set HF_TOKEN)"
    except RepositoryNotFoundError:
        return f", and {hub} has no {what} of this id, or not for this account (HF_TOKEN)"
    except HfHubHTTPError as error:
        status = error.response.status_code
        # For a hub that is briefly busy or broken, the library's own retries are worth their time.
        return None if status == _TOO_MANY or status >= _BROKEN else f", and {hub} answers with HTTP {status}"
    except Exception as error:  # of the HTTP client, whose types change with its version
        return f", and {hub} does not answer ({error or type(error).__name__})"
    return None
