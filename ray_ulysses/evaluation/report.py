"""Options of an evaluation, and its result as a JSON object, as metrics and as files."""

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
"""Kind of facts and questions; see the `needles` module."""
KINDS: tuple[Kind, ...] = get_args(Kind)


Task = Literal["loss", "retrieval"]
TASKS: tuple[Task, ...] = get_args(Task)
DType = Literal["model", "fp32", "bf16"]

_MODEL_FILE, _ADAPTER_FILE = "config.json", "adapter_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRequest:
    """A model to evaluate or to generate with."""

    model: Place
    """Directory of a run or a model."""
    is_run: bool
    step: Which = "latest"
    """Step of the run's checkpoint."""
    dtype: DType = "model"
    """Dtype in which to compute the model."""
    trust_run: bool = False
    """Whether to trust the secrets file, servers and plugins that only the run's stored configuration specifies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRequest(ModelRequest):
    """Options of an evaluation."""

    tasks: tuple[Task, ...] = TASKS
    lengths: tuple[int, ...] = ()
    """Context lengths and row lengths in tokens, ascending; empty for the default lengths."""
    depths: int = 5
    cases: int = 3
    """Number of questions per retrieval cell. The context gain uses eight spans per case."""
    max_tokens: int = 2**18
    """Number of document tokens on which to measure the loss."""
    data: Place | None = None
    """Directory of a prepared corpus; None for the run's own documents."""
    tokenizer: Path | None = None
    """Directory of the tokenizer, or ``bytes``; None for the corpus's or the model's tokenizer."""
    sp_size: int | None = None
    """Number of processes that share a row; None for one process per GPU."""
    seed: int = 0
    out: Place | None = None

    @property
    def run_dir(self) -> Place | None:
        """The run directory; None for a model directory."""
        return self.model if self.is_run else None

    @property
    def model_dir(self) -> Path | None:
        """The model directory, which is always local; None for a run."""
        return self.model if isinstance(self.model, Path) and not self.is_run else None


def names_run(model: Place) -> bool:
    """Return whether a directory is a run (True) or a model (False).

    Raises:
        UserError: The directory is neither.
    """
    if is_file(model / CONFIG_FILE):
        return True
    if not isinstance(model, Path):
        raise UserError(
            f"MODEL={str(model)!r}: is not a run (no {CONFIG_FILE}), and a model directory must be a local path; "
            "specify <run.storage>/<run.name>, or copy the model to this machine"
        )
    if (model / _ADAPTER_FILE).is_file():
        raise UserError(
            f"MODEL={str(model)!r}: is an adapter without its base model; specify the run that trained the adapter, or "
            "merge the two with `export --merge`"
        )
    if (model / _MODEL_FILE).is_file():
        return False
    raise UserError(
        f"MODEL={str(model)!r}: is neither a run (no {CONFIG_FILE}) nor a model directory (no {_MODEL_FILE}); "
        "specify <run.storage>/<run.name>, or a directory written by `export` or save_pretrained"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionBin:
    """Loss of the tokens that are preceded by ``first`` to ``last`` tokens of their document."""

    first: int
    last: int
    tokens: int
    loss_sum: float
    """Total loss of these tokens, in nats."""

    @property
    def loss(self) -> float:
        """Mean loss per token, in nats."""
        return self.loss_sum / self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionLoss:
    """Loss on the beginnings of documents."""

    documents: int
    tokens: int
    loss_sum: float
    """Total loss of all scored tokens, in nats."""
    bins: tuple[PositionBin, ...]
    """Bins by position, in powers of two. Bins without tokens are omitted."""

    @property
    def loss(self) -> float:
        """Mean loss per token, in nats."""
        return self.loss_sum / self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextLoss:
    """Loss of the spans with a given number of preceding tokens."""

    context_tokens: int
    tokens: int
    """Number of scored tokens in the spans, the same for every context."""
    loss: float
    """Mean loss per scored token, in nats."""
    gain: float
    """Reduction of the mean loss compared with the shortest context, in nats."""
    standard_error: float | None
    """Standard error of the gain over spans; None for a single span."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextGain:
    """Loss of the same spans with increasing context."""

    spans: int
    documents: int
    """Number of documents that contain the spans."""
    contexts: tuple[ContextLoss, ...]
    """One entry per context length, ascending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalCell:
    """Results for all questions of one kind, row length and depth."""

    kind: Kind
    length: int
    depth: float
    """Position of the (first) fact, as a fraction of the documents' text."""
    cases: int
    correct: int
    """Number of answers in which every token is the most probable one."""
    chance: float
    """Expected fraction of correct answers when guessing among all possible numbers."""
    chance_shown: float
    """Expected fraction of correct answers when guessing among the numbers in the row."""

    @property
    def accuracy(self) -> float:
        """Fraction of correct answers."""
        return self.correct / self.cases


@dataclass(frozen=True, kw_only=True, slots=True)
class PairBin:
    """Preferences between answers, of the pairs whose longer text has ``first`` to ``last`` tokens."""

    first: int
    last: int
    pairs: int
    summed: int
    """Number of pairs whose chosen answer has the larger log-probability."""
    averaged: int
    """Number of pairs whose chosen answer has the larger log-probability per token."""
    margin_sum: float
    """Sum over pairs of the log-probability per token of the chosen answer minus that of the rejected one, in nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairPreference:
    """How often a model prefers the chosen answers of pairs."""

    bins: tuple[PairBin, ...]
    """Bins by length, in powers of two. Bins without pairs are omitted."""

    @property
    def total(self) -> PairBin:
        """All bins together."""
        names = ("pairs", "summed", "averaged", "margin_sum")
        sums = {name: sum(getattr(one, name) for one in self.bins) for name in names}
        return PairBin(first=self.bins[0].first, last=self.bins[-1].last, **sums)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassReport:
    """How often a classifier predicts the classes of documents."""

    classes: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]
    """Number of documents by their own class, and by the predicted class."""
    loss_sum: float
    """Sum of the documents' cross-entropy in nats."""

    @property
    def documents(self) -> int:
        """Number of documents."""
        return sum(map(sum, self.confusion))

    @property
    def accuracy(self) -> float:
        """Fraction of the documents whose class is predicted."""
        return sum(self.confusion[number][number] for number in range(len(self.classes))) / self.documents

    def scores(self, number: int) -> tuple[float, float, float]:
        """Return precision, recall and F1 of a class; 0 where no document is predicted, or has the class."""
        right = self.confusion[number][number]
        predicted, own = sum(row[number] for row in self.confusion), sum(self.confusion[number])
        return right / max(predicted, 1), right / max(own, 1), 2 * right / max(predicted + own, 1)

    @property
    def macro_f1(self) -> float:
        """Mean F1 over the classes that a document has or is predicted to have."""
        seen = [
            number for number, row in enumerate(self.confusion) if sum(row) + sum(one[number] for one in self.confusion)
        ]
        return sum(self.scores(number)[2] for number in seen) / len(seen)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReport:
    """Results of an evaluation, and how they were measured."""

    model: str
    step: int | None
    """Step of the checkpoint; None for a model directory."""
    dtype: str
    data: str
    is_training_text: bool
    """Whether the model was trained on the documents."""
    sp_size: int
    seed: int
    lengths: tuple[int, ...]
    """Context lengths and row lengths, as requested or by default."""
    versions: dict[str, str]
    notes: tuple[str, ...]
    """Caveats to print with the results."""
    position_loss: PositionLoss | None
    context_gain: ContextGain | None
    retrieval: tuple[RetrievalCell, ...]
    """One cell per question kind, row length and depth; empty if retrieval was not tested."""
    seconds: float
    preference: PairPreference | None = None
    """Preferences between the answers of pairs; None if the documents are texts."""
    classes: ClassReport | None = None
    """Predicted classes; None if the model does not classify documents."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``evaluation.json``: all fields, and the mean for each sum."""
        found: dict[str, Any] = {"format_version": 1, **json.loads(json.dumps(asdict(self)))}
        if self.position_loss is not None:
            found["position_loss"]["loss"] = self.position_loss.loss
            for fields, one in zip(found["position_loss"]["bins"], self.position_loss.bins, strict=True):
                fields["loss"] = one.loss
        if self.classes is not None:
            names = ("precision", "recall", "f1")
            scores = [
                dict(zip(names, self.classes.scores(one), strict=True)) for one in range(len(self.classes.classes))
            ]
            found["classes"] |= {"accuracy": self.classes.accuracy, "macro_f1": self.classes.macro_f1, "scores": scores}
        for fields, cell in zip(found["retrieval"], self.retrieval, strict=True):
            fields["accuracy"] = cell.accuracy
        return found

    def metrics(self) -> dict[str, float]:
        """Return the metrics to track: losses, gains, and retrieval accuracies averaged over depths."""
        found: dict[str, float] = {}
        if self.position_loss is not None:
            found["evaluation/loss"] = self.position_loss.loss
            found |= {f"evaluation/loss_from_{one.first}": one.loss for one in self.position_loss.bins}
        if self.context_gain is not None:
            found |= {f"evaluation/gain_{one.context_tokens}": one.gain for one in self.context_gain.contexts[1:]}
        if self.preference is not None:
            total = self.preference.total
            found["evaluation/pair_accuracy"] = total.summed / total.pairs
            found["evaluation/pair_accuracy_per_token"] = total.averaged / total.pairs
            found["evaluation/pair_margin"] = total.margin_sum / total.pairs
        if self.classes is not None:
            found["evaluation/loss"] = self.classes.loss_sum / self.classes.documents
            found["evaluation/accuracy"] = self.classes.accuracy
            found["evaluation/macro_f1"] = self.classes.macro_f1
        return found | {
            f"evaluation/{kind}_{length}": sum(cell.correct for cell in cells) / sum(cell.cases for cell in cells)
            for (kind, length), cells in self.grids().items()
        }

    def grids(self) -> Mapping[tuple[str, int], Sequence[RetrievalCell]]:
        """Return the cells by kind and row length, in order of depth."""
        grids: dict[tuple[str, int], list[RetrievalCell]] = {(kind, one): [] for kind in KINDS for one in self.lengths}
        for cell in self.retrieval:
            grids[cell.kind, cell.length].append(cell)
        return {key: cells for key, cells in grids.items() if cells}

    def files(self) -> dict[str, str]:
        """Render the result files, by file name."""
        found = self.to_json()
        files = {JSON_FILE: json.dumps(found, indent=2) + "\n"}
        if self.retrieval:
            # Imported here because Matplotlib takes a second to import.
            from ray_ulysses.report.drawing import retrieval_svg

            step = "" if self.step is None else f", step {self.step:,}"
            files[PICTURE_FILE] = retrieval_svg(found["retrieval"], f"{Path(self.model).name}{step}")
        return files

    def write(self, out: Place) -> None:
        """Write the result files, each atomically, and replace or delete the files of an earlier evaluation.

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
    """The result files can't be written. The error carries the result."""

    def __init__(self, text: str, report: EvaluationReport) -> None:
        super().__init__(text)
        self.report = report


def refuse_unwritable(out: Place) -> None:
    """Refuse a directory that can't be created or written, without leaving files behind.

    Raises:
        RunError: The directory can't be created or written.
    """
    # A failed evaluation must not create the directory. If it does not exist, test its nearest existing parent.
    here = [one for one in (out.absolute(), *out.absolute().parents) if lexists(one)] if isinstance(out, Path) else []
    store, probe = open_store(here[0] if here else out), f".probe-{uuid.uuid4().hex}"
    try:
        store.replace(probe, [b"probe"])
        store.delete(probe)
    except OSError as error:
        raise RunError(_unwritable(out, error)) from error


def _unwritable(out: Place, error: OSError) -> str:
    return f"--out={str(out)!r}: can't be written ({error.strerror or error}); use another directory"
