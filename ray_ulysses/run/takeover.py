"""Detects from the claims on a run that another command has taken it over, and records why a session must end."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ray_ulysses.run.checkpoint_store import checkpoint_store, is_apart
from ray_ulysses.run_names import REFUSAL_FOLDER
from ray_ulysses.storage.claim import other_holder
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.storage.store import AlreadyExistsError

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.storage import Store

# Its reader asks repeatedly, and an unreachable object store must not hold up the command.
_RETRY_S = 5.0


def takeover(config: Config, session: str) -> str | None:
    """Return the error if another command has since claimed the run or its checkpoints; else None.

    Every command claims them before it has an attempt. A storage that does not answer proves nothing.

    Args:
        config: The run's configuration.
        session: The asking command, which has claimed them itself unless nobody has.
    """
    stores: list[Store] = [open_store(config.run_dir, retry_s=_RETRY_S)]
    if is_apart(config):
        stores.append(checkpoint_store(config, retry_s=_RETRY_S))
    for store in stores:
        with contextlib.suppress(OSError):
            if (holder := other_holder(store, session)) is not None:
                return (
                    f"another command has taken the run over: {holder}. This one ends; nothing that was committed is "
                    "lost, and the other continues from it. Let one command at a time train a run"
                )
    return None


def leave_refusal(run_dir: Place, session: str, text: str) -> None:
    """Write why this session must end, for the driver and the next attempt; the first reason is kept."""
    with contextlib.suppress(AlreadyExistsError, OSError):
        open_store(run_dir, must_exist=True, retry_s=_RETRY_S).create(f"{REFUSAL_FOLDER}/{session}", [text.encode()])


def refusal(run_dir: Place, session: str) -> str | None:
    """Return why this session must end (unusable input, or a takeover by another command), or ``None``."""
    try:
        return open_store(run_dir, retry_s=_RETRY_S).read_whole(f"{REFUSAL_FOLDER}/{session}").decode()
    except OSError:
        return None
