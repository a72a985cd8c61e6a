"""Options that several commands share."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ray_ulysses.errors import ConfigError, UserError

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.config.reference_to_checkpoint import Which

RunDirectory = Annotated[str, typer.Argument(metavar="RUN", help="The run's directory: <run.storage>/<run.name>.")]
ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file; see configs/ and docs/configuration.md.")
]
Overrides = Annotated[list[str], typer.Option("--set", metavar="A.B=C", help="Override a setting; can be repeated.")]
Branch = Annotated[
    bool,
    typer.Option("--branch", help="Allow other data or another learning rate from the run's newest checkpoint on."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
TrustRun = Annotated[
    bool,
    typer.Option(
        "--trust-run", help="Use the secrets file, the servers and the plugins that only the run's own files specify."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result, warnings and errors.")]
# Limited to 15 digits, since Python refuses to parse very long integers.
STEP_NUMBER = re.compile(r"^[0-9]{1,15}$")
_MOST_SHOWN = 40


def load_run_config(path: Path, overrides: list[str], *, needs_corpus: bool = True) -> Config:
    """Read a configuration. Call this function before slow imports, so that errors are reported immediately.

    ``needs_corpus`` refuses a configuration that names no corpus.
    """
    from ray_ulysses.config import load_config
    from ray_ulysses.run.secrets_file import use_secrets

    try:
        loaded = load_config(path, overrides, environment=os.environ, needs_corpus=needs_corpus)
    except ConfigError as error:
        from ray_ulysses.migration.tables import foreign_tool

        if (tool := foreign_tool(path)) is not None:
            command = f"ray-ulysses init --from {shlex.quote(str(path))} --out converted.yaml"
            raise UserError(f"CONFIG={str(path)!r}: is a configuration of {tool}; to convert it: {command}") from error
        raise
    use_secrets(loaded)
    return loaded


def parse_step(text: str) -> Which:
    """Parse the value of ``--step``.

    Raises:
        UserError: The text is neither a step, ``latest`` nor ``best``.
    """
    if text in ("latest", "best"):
        return "latest" if text == "latest" else "best"
    if not STEP_NUMBER.match(text):
        raise UserError(f"--step={shortened(text)}: must be the step of a committed checkpoint, latest or best")
    return int(text)


def shortened(text: str) -> str:
    """Shorten a user's input for an error message."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
