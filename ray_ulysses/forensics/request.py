"""What `inspect` and other commands that read a run are given."""

from __future__ import annotations

from typing import Literal

from ray_ulysses.errors import UserError
from ray_ulysses.run_names import CONFIG_FILE, JOURNAL_FOLDER
from ray_ulysses.storage.place import Place

TextMode = Literal["cut", "full", "none"]
"""How much of a row's text is shown."""


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
