"""The options of an evaluation, and its result as a JSON object, as metrics, and as files."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from os.path import lexists
from pathlib import Path
from typing import Any, Literal, get_args

from ray_ulysses.config.reference_to_checkpoint import Which
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.run_names import CONFIG_FILE
from ray_ulysses.storage.place import Place, is_file, open_store

JSON_FILE, PICTURE_FILE = "evaluation.json", "retrieval.svg"
Kind = Literal["key_value", "several_keys", "variables"]
"""Kind of facts and questions; see `needles`."""
KINDS: tuple[Kind, ...] = get_args(Kind)


Task = Literal["loss", "retrieval"]
TASKS: tuple[Task, ...] = get_args(Task)
DType = Literal["model", "fp32", "bf16"]

_MODEL_FILE, _ADAPTER_FILE = "config.json", "adapter_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRequest:
    """The options of an evaluation."""

    model: Place
    """Directory of a run or of a model."""
    is_run: bool
    step: Which = "latest"
    tasks: tuple[Task, ...] = TASKS
    lengths: tuple[int, ...] = ()
    """Contexts before spans and lengths of rows, in tokens, ascending; empty for the default."""
    depths: int = 5
    cases: int = 3
    """Questions per cell; the context gain has eight spans for each."""
    max_tokens: int = 2**18
    """Document tokens to measure the loss of."""
    data: Place | None = None
    """Directory of a prepared corpus; None for the run's own documents."""
    tokenizer: Path | None = None
    """Directory of the tokenizer, or ``bytes``; None for the corpus's or the model's."""
    dtype: DType = "model"
    sp_size: int | None = None
    """Processes that share a row; None for one per GPU."""
    seed: int = 0
    out: Place | None = None
    trust_run: bool = False
    """Whether to use the secrets file and the servers that only the run names."""

    @property
    def run_dir(self) -> Place | None:
        """Return the run's directory; None for a model directory."""
        return self.model if self.is_run else None

    @property
    def model_dir(self) -> Path | None:
        """Return the model directory, which is local; None for a run."""
        return self.model if isinstance(self.model, Path) and not self.is_run else None


def names_run(model: Place) -> bool:
    """Return whether a directory is a run's, not a model's.

    Raises:
        UserError: It is neither.
    """
    if is_file(model / CONFIG_FILE):
        return True
    if not isinstance(model, Path):
        raise UserError(
            f"MODEL={str(model)!r}: is not a run (no {CONFIG_FILE}), and a model directory must be a local path; "
            "give <run.storage>/<run.name>, or copy the model here"
        )
    if (model / _ADAPTER_FILE).is_file():
        raise UserError(
            f"MODEL={str(model)!r}: is an adapter without its model; give the run that trained it, or merge the two: "
            "export --merge"
        )
    if (model / _MODEL_FILE).is_file():
        return False
    raise UserError(
        f"MODEL={str(model)!r}: is neither a run (no {CONFIG_FILE}) nor a model directory (no {_MODEL_FILE}); "
        "give <run.storage>/<run.name>, or a directory that `export` or save_pretrained wrote"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionBin:
    """The loss of all tokens with ``first`` to ``last`` tokens of their document before them."""

    first: int
    last: int
    tokens: int
    loss_sum: float
    """Their loss, in nats."""

    @property
    def loss(self) -> float:
        """Return the mean loss, in nats."""
        return self.loss_sum / self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionLoss:
    """The loss over the beginnings of documents."""

    documents: int
    tokens: int
    loss_sum: float
    """Their loss, in nats."""
    bins: tuple[PositionBin, ...]
    """By position, in powers of two; bins without tokens are omitted."""

    @property
    def loss(self) -> float:
        """Return the mean loss, in nats."""
        return self.loss_sum / self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextLoss:
    """The loss of the spans with a number of tokens before each."""

    context_tokens: int
    tokens: int
    """Scored tokens of the spans, the same ones for every context."""
    loss: float
    """Their mean loss, in nats."""
    gain: float
    """Reduction of the loss against the shortest context, in nats."""
    standard_error: float | None
    """Standard error of the gain over spans; None for a single span."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextGain:
    """The loss of the same spans with increasing context."""

    spans: int
    documents: int
    """Number of documents that the spans are from."""
    contexts: tuple[ContextLoss, ...]
    """From the shortest to the longest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalCell:
    """The answers to all questions of one kind, length and depth."""

    kind: Kind
    length: int
    depth: float
    """Share of the documents' text before the (first) fact."""
    cases: int
    correct: int
    """Number of answers of which every token is the most probable one."""
    chance: float
    """Expected share of correct answers when guessing among all possible numbers."""
    chance_shown: float
    """Expected share of correct answers when guessing among the numbers in the row."""

    @property
    def accuracy(self) -> float:
        """Return the share of correct answers."""
        return self.correct / self.cases


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReport:
    """The results of an evaluation, and how they were measured."""

    model: str
    step: int | None
    """The checkpoint's step; None for a model directory."""
    dtype: str
    data: str
    is_training_text: bool
    """Whether the model was trained on the documents."""
    sp_size: int
    seed: int
    lengths: tuple[int, ...]
    """Contexts and lengths of rows, requested or chosen."""
    versions: dict[str, str]
    notes: tuple[str, ...]
    """Caveats for a reader of the numbers."""
    position_loss: PositionLoss | None
    context_gain: ContextGain | None
    retrieval: tuple[RetrievalCell, ...]
    """Cells of all kinds and lengths, if measured."""
    seconds: float

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
        """Return the metrics to track: losses, gains, and accuracies over all depths of a length."""
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
        """Return the text of each file of the result, by name."""
        found = self.to_json()
        files = {JSON_FILE: json.dumps(found, indent=2) + "\n"}
        if self.retrieval:
            # Imported here, since Matplotlib takes a second.
            from ray_ulysses.report.drawing import retrieval_svg

            step = "" if self.step is None else f", step {self.step:,}"
            files[PICTURE_FILE] = retrieval_svg(found["retrieval"], f"{Path(self.model).name}{step}")
        return files

    def write(self, out: Place) -> None:
        """Write each file atomically, and replace the files of an earlier evaluation.

        Raises:
            UnwrittenError: The directory can't be written.
        """
        try:
            store = open_store(out)
            for name, text in self.files().items():
                store.replace(name, [text.encode()])
            if not self.retrieval:
                store.delete(PICTURE_FILE)
        except OSError as error:
            raise UnwrittenError(_unwritable(out, error), self) from error


class UnwrittenError(RunError):
    """The files of a result can't be written; the error carries the result."""

    def __init__(self, text: str, report: EvaluationReport) -> None:
        super().__init__(text)
        self.report = report


def refuse_unwritable(out: Place) -> None:
    """Refuse a directory that can't be written or created; leaves nothing behind.

    Raises:
        RunError: The directory can't be written or created.
    """
    # A failed evaluation must not create the directory, so for a missing one its nearest existing parent is tested.
    here = [one for one in (out.absolute(), *out.absolute().parents) if lexists(one)] if isinstance(out, Path) else []
    store, probe = open_store(here[0] if here else out), f".probe-{uuid.uuid4().hex}"
    try:
        store.replace(probe, [b"probe"])
        store.delete(probe)
    except OSError as error:
        raise RunError(_unwritable(out, error)) from error


def _unwritable(out: Place, error: OSError) -> str:
    return f"--out={str(out)!r}: can't be written ({error.strerror or error}); give another directory"
