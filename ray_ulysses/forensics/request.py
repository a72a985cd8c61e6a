"""Checks the options of ``inspect``; imports nothing that takes time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, get_args

from ray_ulysses.errors import UserError
from ray_ulysses.run_names import CONFIG_FILE, JOURNAL_FOLDER
from ray_ulysses.storage.place import Place

TextMode = Literal["cut", "full", "none"]
"""How much of a row's text is shown."""

_STEP = re.compile(r"^[0-9]{1,15}$")


def check_request(
    *,
    row: int | None,
    verify: bool,
    other: Place | None,
    no_read: bool,
    corpora: Sequence[Place],
    text: str | None,
    checkpoints: bool = False,
    checkpoint: int | Literal["latest"] | None = None,
) -> TextMode:
    """Refuse options that exclude each other, and return how much text to show (pure).

    Args:
        row: The row to show, if any.
        verify: Whether to verify the run.
        other: The run to compare with.
        no_read: Whether to skip reading the corpus.
        corpora: Current directories of corpora.
        text: How much text to show; None for the default.
        checkpoints: Whether to list the checkpoints.
        checkpoint: The checkpoint to verify, if any.

    Raises:
        UserError: Names the options and the allowed combinations.
    """
    reports = {
        "--row": row is not None,
        "--verify": verify,
        "--checkpoints": checkpoints,
        "--verify-checkpoint": checkpoint is not None,
    }
    given = [name for name, is_given in reports.items() if is_given]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: give only one of them at a time")
    if other is not None and not verify:
        raise UserError(f"OTHER={str(other)!r}: a second run needs --verify, which compares the two; add --verify")
    if no_read and not verify:
        raise UserError("--no-read: needs --verify, which reads every trained row again; add --verify, or omit it")
    if corpora and row is None and not verify:
        raise UserError(f"--corpus={corpora[0]}: needs --row or --verify, which read it; add one, or omit it")
    if text is not None and row is None:
        raise UserError(f"--text={text}: needs --row; add --row N, or omit it")
    modes: tuple[TextMode, ...] = get_args(TextMode)
    mode = next((mode for mode in modes if mode == (text or "cut")), None)
    if mode is None:
        raise UserError(f"--text={text}: must be one of {', '.join(modes)}")
    return mode


def parse_checkpoint(text: str) -> int | Literal["latest"]:
    """Return the checkpoint of ``--verify-checkpoint``.

    Raises:
        UserError: It is neither a step nor ``latest``.
    """
    if text == "latest":
        return "latest"
    if not _STEP.match(text):
        raise UserError(f"--verify-checkpoint={text[:40]}: must be the number of a committed step, or latest")
    return int(text)


def check_run(run_dir: Place, argument: str = "RUN") -> None:
    """Refuse a directory that is not a run directory.

    Args:
        run_dir: The directory.
        argument: Its name on the command line, for the text of an error.

    Raises:
        UserError: It holds neither a configuration nor a journal.
    """
    if not (run_dir / CONFIG_FILE).is_file() and not (run_dir / JOURNAL_FOLDER).is_dir():
        raise UserError(
            f"{argument}={str(run_dir)!r}: is not a run directory; give <run.storage>/<run.name>, with config.yaml"
        )
