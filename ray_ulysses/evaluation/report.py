"""The result of an evaluation as one JSON object, as metrics, and as files."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from os.path import lexists
from pathlib import Path
from typing import Any

from ray_ulysses.errors import RunError
from ray_ulysses.evaluation.results import KINDS, ContextGain, PositionLoss, RetrievalCell
from ray_ulysses.storage.place import Place, store_at

JSON_FILE, PICTURE_FILE = "evaluation.json", "retrieval.svg"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReport:
    """What was measured, and how."""

    model: str
    """Directory of the run or model."""
    step: int | None
    """The checkpoint's step; None for a model directory."""
    dtype: str
    """Type that the model computed in."""
    data: str
    """The documents, in words."""
    is_training_text: bool
    """Whether the model was trained on them."""
    sp_size: int
    """Processes that shared a row."""
    seed: int
    """Seed of everything drawn."""
    lengths: tuple[int, ...]
    """Contexts and lengths of rows that were asked for, or chosen."""
    versions: dict[str, str]
    """Versions of the libraries."""
    notes: tuple[str, ...]
    """What a reader of the numbers must know."""
    position_loss: PositionLoss | None
    """The loss by position, if measured."""
    context_gain: ContextGain | None
    """The loss by context, if measured."""
    retrieval: tuple[RetrievalCell, ...]
    """Cells of all kinds and lengths, if measured."""
    seconds: float
    """Wall-clock time."""

    def to_json(self) -> dict[str, Any]:
        """Return the object of ``evaluation.json``: all fields, and the mean of each sum."""
        found: dict[str, Any] = {"format_version": 1, **json.loads(json.dumps(asdict(self)))}
        if self.position_loss is not None:
            found["position_loss"]["loss"] = self.position_loss.loss
            for fields, one in zip(found["position_loss"]["bins"], self.position_loss.bins, strict=True):
                fields["loss"] = one.loss
        for fields, cell in zip(found["retrieval"], self.retrieval, strict=True):
            fields["accuracy"] = cell.accuracy
        return found

    def metrics(self) -> dict[str, float]:
        """Return the numbers that are worth a curve: losses, gains, and accuracies over all depths of a length."""
        found: dict[str, float] = {}
        if self.position_loss is not None:
            found["evaluation/loss"] = self.position_loss.loss
            found |= {f"evaluation/loss_from_{one.first}": one.loss for one in self.position_loss.bins}
        if self.context_gain is not None:
            found |= {f"evaluation/gain_{one.context_tokens}": one.gain for one in self.context_gain.contexts[1:]}
        return found | {
            f"evaluation/{kind}_{length}": sum(cell.correct for cell in cells) / sum(cell.cases for cell in cells)
            for (kind, length), cells in self.grids().items()
        }

    def grids(self) -> Mapping[tuple[str, int], Sequence[RetrievalCell]]:
        """Return the cells of each kind and length, in the order of depths."""
        grids: dict[tuple[str, int], list[RetrievalCell]] = {(kind, one): [] for kind in KINDS for one in self.lengths}
        for cell in self.retrieval:
            grids[cell.kind, cell.length].append(cell)
        return {key: cells for key, cells in grids.items() if cells}

    def files(self) -> dict[str, str]:
        """Return the files of the result by name."""
        found = self.to_json()
        files = {JSON_FILE: json.dumps(found, indent=2) + "\n"}
        if self.retrieval:
            # Only here: Matplotlib takes a second.
            from ray_ulysses.report.drawing import retrieval_svg

            step = "" if self.step is None else f", step {self.step:,}"
            files[PICTURE_FILE] = retrieval_svg(found["retrieval"], f"{Path(self.model).name}{step}")
        return files

    def write(self, out: Place) -> None:
        """Write the files, each whole or not at all; those of an earlier evaluation are replaced.

        Raises:
            UnwrittenError: The directory can't be written.
        """
        try:
            store = store_at(out)
            for name, text in self.files().items():
                store.replace(name, [text.encode()])
            if not self.retrieval:
                store.delete(PICTURE_FILE)
        except OSError as error:
            raise UnwrittenError(_unwritable(out, error), self) from error


class UnwrittenError(RunError):
    """The files of a result can't be written.

    Attributes:
        report: The result.
    """

    def __init__(self, text: str, report: EvaluationReport) -> None:
        super().__init__(text)
        self.report = report


def refuse_unwritable(out: Place) -> None:
    """Refuse a directory in which the files of a result can't be written; leaves nothing behind.

    Raises:
        RunError: It can't be written, or made.
    """
    # An evaluation that fails makes no directory: an absent one is tried where it would be made.
    here = [one for one in (out.absolute(), *out.absolute().parents) if lexists(one)] if isinstance(out, Path) else []
    store, probe = store_at(here[0] if here else out), f".probe-{uuid.uuid4().hex}"
    try:
        store.replace(probe, [b"probe"])
        store.delete(probe)
    except OSError as error:
        raise RunError(_unwritable(out, error)) from error


def _unwritable(out: Place, error: OSError) -> str:
    return f"--out={str(out)!r}: can't be written ({error.strerror or error}); give another directory"
