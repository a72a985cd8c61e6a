"""Access to Hugging Face Hub repositories. One probe request detects an unreachable hub before libraries retry."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.storage.location import expand_home
from ray_ulysses.storage.regular import open_regular

Kind = Literal["model", "dataset"]
_ANSWER_S = 5.0
_TOO_MANY, _BROKEN = 429, 500
_NO_TOKEN, _NO_ACCESS = 401, (403, 404)
_WEIGHTS = re.compile(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_PROBED = {"model": "config.json", "dataset": "README.md"}


def hub_folder(name: str | Path, setting: str, files: Sequence[str], hint: str) -> Path:
    """Return the path of a local model directory, or of the cached snapshot of a model repository on the hub.

    Args:
        name: A directory or a repository id.
        setting: The setting and its value, for errors.
        files: Patterns of top-level repository files to fetch. If the hub is unreachable and the cache contains the
            first file, the cached snapshot is used.
        hint: The suggested fix, for errors.

    Raises:
        UserError: ``name`` is not a directory, and neither the hub nor its cache provides the repository.
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
        raise UserError(f"{setting}: the download from the hub failed ({error}); {hint}") from error
    return Path(found)


def is_id(name: str) -> bool:
    """Return whether a string is a valid repository id: ``NAME`` or ``OWNER/NAME``."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def hub_refusal(name: str, kind: Kind = "model") -> str | None:
    """Return a clause that describes why the hub can't provide a repository, or None if it can.

    The clause is empty if ``name`` is a directory or is not a valid repository id.
    """
    if expand_home(name).is_dir() or not is_id(name):
        return ""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return f", and HF_HUB_OFFLINE=1 allows only the local hub cache, which has no {kind} with this id"
    return _refusal(constants.ENDPOINT, name, kind)


@cache
def _refusal(endpoint: str, name: str, kind: Kind) -> str | None:
    """Probe the hub once per process, since each request to a hub behind a firewall takes the full timeout."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
    )

    hub = f"the hub at {endpoint}"
    try:
        get_hf_file_metadata(hf_hub_url(name, _PROBED[kind], repo_type=kind, endpoint=endpoint), timeout=_ANSWER_S)
    except EntryNotFoundError:
        return None
    except GatedRepoError:
        return f", and {hub} restricts this {kind} to accounts that accepted its terms (set HF_TOKEN)"
    except RepositoryNotFoundError:
        return f", and {hub} has no {kind} with this id that this account can access (HF_TOKEN)"
    except HfHubHTTPError as error:
        status = error.response.status_code
        # The library's own retries handle a hub that is briefly overloaded or broken.
        return None if status == _TOO_MANY or status >= _BROKEN else f", and {hub} answers with HTTP {status}"
    except Exception as error:  # the HTTP client's exception types vary with its version
        return f", and {hub} does not respond ({error or type(error).__name__})"
    return None


def refuse_push(repo: str, setting: str) -> None:
    """Refuse an upload that can't succeed, without a request.

    Raises:
        UserError: The repository id is invalid, the hub is switched off, or there is no token.
    """
    from huggingface_hub import constants, get_token

    if not is_id(repo):
        raise UserError(f"{setting}: is not a repository id; use OWNER/NAME")
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{setting}: HF_HUB_OFFLINE=1 forbids the upload; unset it")
    if get_token() is None:
        raise UserError(
            f"{setting}: there is no token for {constants.ENDPOINT}; set HF_TOKEN to a token with write access, or run "
            "`hf auth login`"
        )


def push_folder(folder: Path, files: Collection[str], repo: str, setting: str, *, private: bool, message: str) -> str:
    """Upload files of a directory to a model repository on the hub, in one commit.

    The repository is created if it does not exist. The commit deletes weight files of an earlier model from its top
    level, or those of an earlier adapter if an adapter is uploaded.

    Args:
        folder: The directory.
        files: Names of the files to upload.
        repo: The repository's id.
        setting: The setting and its value, for errors.
        private: Whether a new repository is private. An existing repository keeps its visibility.
        message: The commit's message.

    Returns:
        The commit's URL.

    Raises:
        UserError: A file is a symbolic link or not a regular file.
        RunError: The upload failed; the repository is unchanged.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()
    hub, api = f"the hub at {constants.ENDPOINT}", HfApi()
    for name in files:
        open_regular(folder / name, folder).close()
    try:
        made = api.create_repo(repo, private=private, exist_ok=True).repo_id
        kinds = {match[1] for name in files if (match := _WEIGHTS.fullmatch(name))}
        there = {one for one in api.list_repo_files(made) if (match := _WEIGHTS.fullmatch(one)) and match[1] in kinds}
        added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in sorted(files)]
        deleted = [CommitOperationDelete(path_in_repo=name) for name in sorted(there - {*files})]
        return str(api.create_commit(made, [*added, *deleted], commit_message=message).commit_url)
    except HfHubHTTPError as error:
        status = error.response.status_code
        rule, hint = f"{hub} answers with HTTP {status}", "try again later"
        if status == _NO_TOKEN:
            rule, hint = f"{hub} does not accept the token", "set HF_TOKEN to a valid one"
        elif status in _NO_ACCESS:
            rule, hint = f"the token may not write there (HTTP {status})", "use a token with write access to the owner"
        raise RunError(f"{setting}: {rule}; {hint}") from error
    except Exception as error:  # the HTTP client's exception types vary with its version
        raise RunError(f"{setting}: {hub} did not store the files ({error or type(error).__name__})") from error
