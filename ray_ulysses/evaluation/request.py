"""What an evaluation is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ray_ulysses.errors import UserError
from ray_ulysses.export.request import StepChoice
from ray_ulysses.run_names import CONFIG_FILE
from ray_ulysses.storage.place import Place, is_file

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
    step: StepChoice = "latest"
    tasks: tuple[Task, ...] = TASKS
    lengths: tuple[int, ...] = ()
    """Contexts before spans and lengths of rows, in tokens, ascending; empty for the default."""
    depths: int = 5
    cases: int = 3
    """Questions per cell; the context gain has eight times as many spans."""
    max_tokens: int = 2**18
    """Tokens of documents whose loss is measured."""
    data: Place | None = None
    """Directory of a prepared corpus; None for the run's own documents."""
    tokenizer: Path | None = None
    """Directory of the tokenizer, or ``bytes``; None for that of the corpus or the model."""
    dtype: DType = "model"
    sp_size: int | None = None
    """Processes that share a row; None for one per GPU."""
    seed: int = 0
    out: Place | None = None
    trust_run: bool = False
    """Whether the file of secrets and the servers that only the run names are used."""

    @property
    def run_dir(self) -> Place | None:
        """Return the run's directory; None for a model directory."""
        return self.model if self.is_run else None

    @property
    def model_dir(self) -> Path | None:
        """Return the model directory, which is local; None for a run."""
        return self.model if isinstance(self.model, Path) and not self.is_run else None


def names_run(model: Place) -> bool:
    """Return whether a directory is that of a run, and not of a model.

    Raises:
        UserError: It is neither.
    """
    if is_file(model / CONFIG_FILE):
        return True
    if not isinstance(model, Path):
        raise UserError(
            f"MODEL={str(model)!r}: is no run (it holds no {CONFIG_FILE}), and a model directory must be on a path; "
            "give <run.storage>/<run.name>, or copy the model here"
        )
    if (model / _ADAPTER_FILE).is_file():
        raise UserError(
            f"MODEL={str(model)!r}: is an adapter, without the model that it belongs to; give the run that trained it, "
            "or merge the two: export --merge"
        )
    if (model / _MODEL_FILE).is_file():
        return False
    raise UserError(
        f"MODEL={str(model)!r}: is neither a run (no {CONFIG_FILE}) nor a model directory (no {_MODEL_FILE}); "
        "give <run.storage>/<run.name>, or a directory that `export` or save_pretrained wrote"
    )
