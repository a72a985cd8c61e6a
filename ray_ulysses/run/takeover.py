"""Detects that another command has claimed a run, and records why a session must end."""

from __future__ import annotations

import contextlib

from ray_ulysses.config import Config
from ray_ulysses.run.checkpoint_store import checkpoint_store, is_apart
from ray_ulysses.run_names import REFUSAL_FOLDER
from ray_ulysses.storage import Store
from ray_ulysses.storage.claim import other_holder
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.storage.store import AlreadyExistsError

# Callers poll repeatedly, and an unreachable object store must not block the command.
_RETRY_S = 5.0


def takeover(config: Config, session: str) -> str | None:
    """Return an error message if another command has claimed the run or its checkpoints, or None otherwise.

    Every command acquires both claims before its first attempt. Storage errors are ignored.

    Args:
        config: The run's configuration.
        session: The session id of this command.
    """
    stores: list[Store] = [open_store(config.run_dir, retry_s=_RETRY_S)]
    if is_apart(config):
        stores.append(checkpoint_store(config, retry_s=_RETRY_S))
    for store in stores:
        with contextlib.suppress(OSError):
            if (holder := other_holder(store, session)) is not None:
                return (
                    f"another command has taken over the run: {holder}. This command ends; the other command continues "
                    "from the last committed checkpoint. Only one command at a time can train a run"
                )
    return None


def leave_refusal(run_dir: Place, session: str, text: str) -> None:
    """Record why this session must end, for the driver and the next attempt. Only the first reason is stored."""
    with contextlib.suppress(AlreadyExistsError, OSError):
        open_store(run_dir, must_exist=True, retry_s=_RETRY_S).create(f"{REFUSAL_FOLDER}/{session}", [text.encode()])


def refusal(run_dir: Place, session: str) -> str | None:
    """Return why this session must end (invalid input or another command's takeover), or None if it may continue."""
    try:
        return open_store(run_dir, retry_s=_RETRY_S).read_whole(f"{REFUSAL_FOLDER}/{session}").decode()
    except OSError:
        return None
