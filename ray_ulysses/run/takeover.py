"""Whether another command has taken a run over: told from the numbers of its attempts and from the journal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from ray_ulysses.errors import UserError
from ray_ulysses.tracking.events import AttemptStarted
from ray_ulysses.tracking.journal import attempt_numbers
from ray_ulysses.tracking.journal_reader import read_entries
from ray_ulysses.tracking.step_runs import Entry

Owner = Literal["own", "other", "unsaid", "elsewhere"]
"""Whose an attempt is: this command's; another's, by its own word; of this directory, and it has not said whose; or of
another directory, since an attempt leaves a journal here before it is announced beside the checkpoints."""


def owner_of(attempt: int, events: Sequence[Entry], numbers: Collection[int], session: str) -> Owner:
    """Return whose an attempt is (pure).

    Args:
        attempt: Its number.
        events: The journal's.
        numbers: Attempts that have a journal.
        session: This command's name.
    """
    sessions = {event.attempt: event.session for event in events if isinstance(event, AttemptStarted)}
    said = sessions.get(attempt)
    if said is not None:
        return "own" if said == session else "other"
    return "unsaid" if attempt in numbers else "elsewhere"


def is_taken_over(run_dir: Path, newest: int, session: str) -> bool:
    """Whether the newest attempt says itself that it is another command's; asked by an attempt that was overtaken.

    That it has not said so yet is no proof: an attempt that was thought dead is overtaken by its own command. Nor is a
    journal that is not there: another host's file may show up late.
    """
    return owner_of(newest, read_entries(run_dir), attempt_numbers(run_dir), session) == "other"


def refuse_taken_over(run_dir: Path, newest: int, session: str) -> None:
    """Keep a command from taking a run back from who has taken it over; asked before an attempt is announced.

    Args:
        run_dir: The run's directory; what other hosts have written there is to be seen.
        newest: The newest attempt that was announced beside the checkpoints.
        session: This command's name.

    Raises:
        UserError: This command has had an attempt, and the newest one is another's.
    """
    events = read_entries(run_dir)
    own = [event.attempt for event in events if isinstance(event, AttemptStarted) and event.session == session]
    if not own or newest <= max(own):
        return
    if owner_of(newest, events, attempt_numbers(run_dir), session) in ("other", "elsewhere"):
        raise UserError(taken_over_text(newest))


def taken_over_text(newest: int) -> str:
    """Return what is to be said of it."""
    return (
        f"another command has taken the run over: attempt {newest} is its own. This one ends; nothing that was "
        "committed is lost, and the other goes on from it. Let one command at a time train a run"
    )
