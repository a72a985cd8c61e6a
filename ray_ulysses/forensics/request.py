"""What can be asked of a run's data, and which questions do not go together; imports nothing that takes time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from ray_ulysses.errors import UserError
from ray_ulysses.run_names import CONFIG_FILE, JOURNAL_FOLDER

TextMode = Literal["cut", "full", "none"]
"""How much of a row's text is told."""

_STEP = re.compile(r"^[0-9]{1,15}$")


def check_request(
    *,
    row: int | None,
    verify: bool,
    other: Path | None,
    no_read: bool,
    corpora: Sequence[Path],
    text: str | None,
    checkpoints: bool = False,
    checkpoint: int | Literal["latest"] | None = None,
) -> TextMode:
    """Refuse questions that do not go together, and return how much text is asked for (pure).

    Args:
        row: The row to look at, if one is asked for.
        verify: Whether to verify the run.
        other: The run to compare with.
        no_read: Whether to leave out reading the corpus.
        corpora: Where corpora lie now.
        text: How much text to tell; None for the default.
        checkpoints: Whether to list the checkpoints.
        checkpoint: The checkpoint to verify, if one is to be.

    Raises:
        UserError: Says what goes with what.
    """
    asked = {
        "--row": row is not None,
        "--verify": verify,
        "--checkpoints": checkpoints,
        "--verify-checkpoint": checkpoint is not None,
    }
    questions = [name for name, is_asked in asked.items() if is_asked]
    if len(questions) > 1:
        number = {2: "two", 3: "three", 4: "four"}[len(questions)]
        raise UserError(f"{' and '.join(questions)} are {number} questions; ask one at a time")
    if other is not None and not verify:
        raise UserError(f"OTHER={str(other)!r}: a second run goes with --verify, which compares the two; add --verify")
    if no_read and not verify:
        raise UserError("--no-read: goes with --verify, which reads every trained row anew; add --verify, or leave it")
    if corpora and row is None and not verify:
        raise UserError(f"--corpus={corpora[0]}: goes with --row or --verify, which read it; add one, or leave it")
    if text is not None and row is None:
        raise UserError(f"--text={text}: goes with --row; add --row N, or leave it")
    modes: tuple[TextMode, ...] = get_args(TextMode)
    mode = next((mode for mode in modes if mode == (text or "cut")), None)
    if mode is None:
        raise UserError(f"--text={text}: must be one of {', '.join(modes)}")
    return mode


def parse_checkpoint(text: str) -> int | Literal["latest"]:
    """Return which checkpoint ``--verify-checkpoint`` names.

    Raises:
        UserError: It is neither a step nor ``latest``.
    """
    if text == "latest":
        return "latest"
    if not _STEP.match(text):
        raise UserError(f"--verify-checkpoint={text[:40]}: must be the number of a committed step, or latest")
    return int(text)


def check_run(run_dir: Path, argument: str = "RUN") -> None:
    """Refuse a directory that is no run's.

    Args:
        run_dir: The directory.
        argument: What the command line calls it, for the text of an error.

    Raises:
        UserError: It holds neither a configuration nor a journal.
    """
    if not (run_dir / CONFIG_FILE).is_file() and not (run_dir / JOURNAL_FOLDER).is_dir():
        raise UserError(
            f"{argument}={str(run_dir)!r}: is no run directory; give <run.storage>/<run.name>, which holds config.yaml"
        )
