"""Detects that another command has taken a run over, from the numbers of its attempts and from the journal."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal

from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.errors import UserError
from ray_ulysses.run_names import REFUSAL_FOLDER
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.storage.store import AlreadyExistsError
from ray_ulysses.tracking.events import AttemptStarted
from ray_ulysses.tracking.journal_files import attempt_numbers
from ray_ulysses.tracking.journal_reader import read_entries
from ray_ulysses.tracking.steps import Entry

if TYPE_CHECKING:
    from ray_ulysses.storage import Store

Owner = Literal["own", "other", "unknown", "elsewhere"]
"""Owner of an attempt: this command; another one, as the attempt recorded; unknown, since the attempt has a journal in
this directory and has not recorded its command; or another directory, since an attempt creates its journal before it
is announced beside the checkpoints."""


def owner_of(attempt: int, events: Sequence[Entry], numbers: Collection[int], session: str) -> Owner:
    """Return who owns an attempt (pure).

    Args:
        attempt: Its number.
        events: The journal's events.
        numbers: Attempts that have a journal.
        session: This command's name.
    """
    sessions = {event.attempt: event.session for event in events if isinstance(event, AttemptStarted)}
    found = sessions.get(attempt)
    if found is not None:
        return "own" if found == session else "other"
    return "unknown" if attempt in numbers else "elsewhere"


def is_taken_over(run_dir: Place, newest: int, session: str) -> bool:
    """Return whether the newest attempt has recorded that it is another command's; for an attempt that was overtaken.

    A missing record is no proof: an attempt that was believed dead is overtaken by its own command. Nor is a missing
    journal: another host's file may become visible late.
    """
    return owner_of(newest, read_entries(run_dir, ends_only=True), attempt_numbers(run_dir), session) == "other"


def refuse_taken_over(run_dir: Place, newest: int, session: str) -> None:
    """Keep a command from taking a run back from the command that has it now; called before an attempt is announced.

    Args:
        run_dir: The run's directory, in which the files of other hosts are visible.
        newest: The newest attempt that was announced beside the checkpoints.
        session: This command's name.

    Raises:
        UserError: This command has had an attempt, and the newest one is another's.
    """
    events = read_entries(run_dir, ends_only=True)
    own = [event.attempt for event in events if isinstance(event, AttemptStarted) and event.session == session]
    if not own or newest <= max(own):
        return
    if owner_of(newest, events, attempt_numbers(run_dir), session) in ("other", "elsewhere"):
        raise UserError(taken_over_text(newest))


def taken_over_text(newest: int) -> str:
    """Return the error for a command whose run was taken over by an attempt of another."""
    return (
        f"another command has taken the run over: attempt {newest} belongs to it. This one ends; nothing that was "
        "committed is lost, and the other continues from it. Let one command at a time train a run"
    )


# Its reader asks again, and an object store that is away must not hold up the command.
_RETRY_S = 5.0


def leave_refusal(run_dir: Place, session: str, text: str) -> None:
    """Write why this session is to end, for the driver and for its next attempt; the first reason is kept."""
    with contextlib.suppress(AlreadyExistsError, OSError):
        open_store(run_dir, must_exist=True, retry_s=_RETRY_S).create(f"{REFUSAL_FOLDER}/{session}", [text.encode()])


def refusal(run_dir: Place, session: str) -> str | None:
    """Return why this session is to end, or ``None``: unusable input, or another command has the run now."""
    try:
        return open_store(run_dir, retry_s=_RETRY_S).read_whole(f"{REFUSAL_FOLDER}/{session}").decode()
    except OSError:
        return None


def refuse_if_taken_over(run_dir: Place, store: Store, session: str) -> None:
    """Leave a refusal if the newest attempt is certainly another command's; an unreachable storage proves nothing."""
    with contextlib.suppress(OSError):
        newest = read_lineage(store).newest_attempt
        if is_taken_over(run_dir, newest, session):
            leave_refusal(run_dir, session, taken_over_text(newest))
