"""Notes in the run's directory that a session is to end, for its command and for its other attempts."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.run.takeover import is_taken_over, taken_over_text
from ray_ulysses.run_names import REFUSAL_FOLDER
from ray_ulysses.storage.place import Place, store_at
from ray_ulysses.storage.store import AlreadyExistsError, read_bytes

if TYPE_CHECKING:
    from ray_ulysses.storage import Store

# Its reader asks again, and an object store that is away must not hold up the command.
_RETRY_S = 5.0


def leave_refusal(run_dir: Place, session: str, text: str) -> None:
    """Write why this session is to end, for the driver and for its next attempt; the first reason is kept."""
    with contextlib.suppress(AlreadyExistsError, OSError):
        store_at(run_dir, must_exist=True, retry_s=_RETRY_S).create(f"{REFUSAL_FOLDER}/{session}", [text.encode()])


def refusal(run_dir: Place, session: str) -> str | None:
    """Return why this session is to end, or ``None``: unusable input, or another command has the run now."""
    try:
        return read_bytes(store_at(run_dir, retry_s=_RETRY_S), f"{REFUSAL_FOLDER}/{session}").decode()
    except OSError:
        return None


def refuse_if_taken_over(run_dir: Place, store: Store, session: str) -> None:
    """Leave a refusal if the newest attempt is certainly another command's; an unreachable storage proves nothing."""
    with contextlib.suppress(OSError):
        newest = read_lineage(store).newest_attempt
        if is_taken_over(run_dir, newest, session):
            leave_refusal(run_dir, session, taken_over_text(newest))
