"""What can be asked of a run's data, and which questions do not go together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from ray_ulysses.errors import UserError
from ray_ulysses.forensics.piece_text import TextMode


def check_request(
    *,
    row: int | None,
    verify: bool,
    other: Path | None,
    no_read: bool,
    corpora: Sequence[Path],
    text: str | None,
    checkpoints: bool = False,
    checkpoint: int | None = None,
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
        checkpoint: The step of the checkpoint to verify, if one is to be.

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
