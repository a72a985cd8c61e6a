"""Parses ``model.resume_from``, which identifies a checkpoint of another run by location or through MLflow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ray_ulysses.errors import UserError, without_secret
from ray_ulysses.run_names import STEP_LOCATION
from ray_ulysses.storage.location import LocationError, parse_location

Which = int | Literal["latest", "best"]
"""A step number, ``latest`` for the newest checkpoint, or ``best`` for the checkpoint with the lowest loss."""

SETTING = "model.resume_from"

_MLFLOW = "mlflow:"
_WORDS: dict[str, Which] = {"latest": "latest", "best": "best"}
_FORMS = (
    "write RUN, RUN@200, RUN@latest or RUN@best, where RUN is a run's directory or the URI of its checkpoint store, or "
    "mlflow:RUN/200, mlflow:RUN/latest or mlflow:RUN/best, where RUN is the id or the name of an MLflow run"
)


class ReferenceProblem(UserError):
    """A text is not a valid checkpoint reference."""

    def __init__(self, text: str, rule: str, hint: str = _FORMS) -> None:
        self.shown, self.rule, self.hint = without_secret(text), rule, hint
        super().__init__(f"{SETTING}={self.shown!r}: {rule}; {hint}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReference:
    """A checkpoint of a run that is identified by its location."""

    location: str
    """The run's directory, or the URI of the run's checkpoint store."""
    which: Which
    """Selected checkpoint of the run."""

    def __str__(self) -> str:
        return f"{self.location}@{self.which}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MlflowReference:
    """A checkpoint of a run that is identified through MLflow."""

    run: str
    """Id or name of the MLflow run."""
    which: Which
    """Selected checkpoint of the run."""


def parse_reference(text: str) -> RunReference | MlflowReference:
    """Parse a checkpoint reference. Without a selector, the reference means the newest checkpoint of the run.

    Args:
        text: ``<run>[@<step|latest|best>]``, ``<run>/checkpoints/step-<step>``, or
            ``mlflow:<run>/<step|latest|best>``.

    Raises:
        ReferenceProblem: The text is not a valid reference.
    """
    if not text.strip() or text != text.strip():
        raise ReferenceProblem(text, "must be a checkpoint reference, without surrounding spaces")
    if text.startswith(_MLFLOW):
        return _parse_mlflow(text)
    reference = _parse_run(text)
    try:
        parse_location(reference.location)
    except LocationError as error:
        raise ReferenceProblem(text, error.rule, error.hint) from error
    return reference


def _parse_run(text: str) -> RunReference:
    run, mark, selector = text.rpartition("@")
    # In s3://key@bucket/runs, the text after the @ is part of the path.
    if mark and "/" not in selector:
        if not run:
            raise ReferenceProblem(text, f"has no run before @{selector}")
        return RunReference(location=run, which=_which(text, selector))
    if folder := STEP_LOCATION.match(text):
        return RunReference(location=folder["run"] + (folder["options"] or ""), which=int(folder["step"]))
    return RunReference(location=text, which="latest")


def _parse_mlflow(text: str) -> MlflowReference:
    rest = text.removeprefix(_MLFLOW)
    run, mark, selector = rest.rpartition("/")
    if not mark:
        return MlflowReference(run=_run(text, rest), which="latest")
    return MlflowReference(run=_run(text, run), which=_which(text, selector))


def _run(text: str, run: str) -> str:
    if not run or "/" in run or "@" in run:
        raise ReferenceProblem(text, f"{run!r} is not the id or name of an MLflow run")
    return run


def _which(text: str, selector: str) -> Which:
    if selector in _WORDS:
        return _WORDS[selector]
    if not selector.isascii() or not selector.isdigit():
        hint = _FORMS
        if not text.startswith(_MLFLOW):
            hint += f"; if {selector!r} is the end of a directory's name, add @latest"
        raise ReferenceProblem(text, f"{selector!r} is not a step, latest or best", hint)
    return int(selector)
