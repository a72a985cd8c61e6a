"""The command's own restarts, where Ray Train can't go on, and its last word when nothing helps any more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray.train.v2.api.exceptions import TrainingFailedError

from ray_ulysses.cluster.failures import cause_of
from ray_ulysses.errors import RunError
from ray_ulysses.logging import get_logger
from ray_ulysses.run.completion import settle_failed
from ray_ulysses.run.takeover import is_taken_over
from ray_ulysses.tracking.failures import newest_attempt
from ray_ulysses.tracking.journal import attempt_numbers
from ray_ulysses.trainer.failures import COMMAND, FailureBook

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.tracking.failures import Failure

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """What Ray ended with.

    Attributes:
        error: What it raised.
        logs: Where it keeps the logs of this node; None if it does not say.
    """

    error: BaseException
    logs: str | None


class TrainingFailed(RunError):
    """The run has failed for good; the text is for a person."""


def failure_book(config: Config, session: str) -> FailureBook:
    """Return the book of a command that is about to start its workers."""
    first = max(attempt_numbers(config.run_dir), default=0) + 1
    return FailureBook(config=config, session=session, first_attempt=first, writer=COMMAND)


def train_until_done(book: FailureBook, train_once: Callable[[], Ended | None]) -> None:
    """Run the workers until the run has come to its end.

    Args:
        book: Judges what Ray Train's controller could not: its own death, or an end that it did not see.
        train_once: Runs the workers; returns what Ray ended with, or None for a run that is done.

    Raises:
        TrainingFailed: Nothing helps any more.
    """
    while True:
        num_told = len(book.failures())
        ended = train_once()
        if ended is None:
            return
        told = book.failures()
        if isinstance(ended.error, TrainingFailedError) and len(told) > num_told:
            # The controller has judged it; where it was to go on, Ray could not start the workers from where it stood.
            failure = told[-1][1]
        else:
            failure = book.judge(cause_of(ended.error))
        if not failure.restarts:
            raise TrainingFailed(failure_text(book.config, failure, ended.logs)) from ended.error
        _log.debug("Ray could not go on; the command starts the workers again", exc_info=ended.error)


def settle_failure(book: FailureBook) -> None:
    """Say everywhere that the command's last failure has ended the run, unless another command has it now."""
    told = book.failures()
    newest = newest_attempt(book.config.run_dir)
    taken_over = newest is not None and is_taken_over(book.config.run_dir, newest.attempt, book.session)
    if told and not taken_over:
        settle_failed(book.config, told[-1][1])


def failure_text(config: Config, failure: Failure, logs: str | None) -> str:
    """Return the last words of a run that has failed: what happened, what to do, and how to go on."""
    where = f"; node {failure.node}" if failure.node else ""
    lines = [f"run {config.run.name!r} failed: {failure.in_words()}{where}"]
    lines.append(f"{failure.way_out}; logs of the workers: {logs}" if logs else failure.way_out)
    step = "there" if failure.committed_step is None else f"step {failure.committed_step:,}"
    lines.append(f"what is committed in {config.run_dir} stays; the same command resumes from {step}")
    return "\n".join(lines)
