"""The options of an evaluation, parsed from the command line (pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ray_ulysses.errors import UserError
from ray_ulysses.export.request import StepChoice, parse_step
from ray_ulysses.run_names import CONFIG_FILE
from ray_ulysses.storage.place import Place, place_of

Task = Literal["loss", "retrieval"]
TASKS: tuple[Task, ...] = get_args(Task)
DType = Literal["model", "fp32", "bf16"]

_LENGTH = re.compile(r"^(\d{1,9})([km]?)$", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "k": 2**10, "m": 2**20}
_MODEL_FILE, _ADAPTER_FILE = "config.json", "adapter_config.json"
_SHORTEST = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRequest:
    """The options of an evaluation.

    Attributes:
        model: Directory of a run or of a model.
        is_run: Which of the two.
        step: The checkpoint of a run.
        tasks: What is measured.
        lengths: Contexts before spans and lengths of rows, in tokens, ascending; empty for the default.
        depths: Number of depths of facts.
        cases: Questions per cell; the context gain has eight times as many spans.
        max_tokens: Tokens of documents whose loss is measured.
        data: Directory of a prepared corpus; None for the run's own documents.
        tokenizer: Directory of the tokenizer, or ``bytes``; None for that of the corpus or the model.
        dtype: Type that the model computes in.
        sp_size: Processes that share a row; None for one per GPU.
        seed: Seed of everything drawn.
        out: Directory of the results; None for the default.
        trust_run: Whether the file of secrets and the servers that only the run names are used.
    """

    model: Place
    is_run: bool
    step: StepChoice = "latest"
    tasks: tuple[Task, ...] = TASKS
    lengths: tuple[int, ...] = ()
    depths: int = 5
    cases: int = 3
    max_tokens: int = 2**18
    data: Place | None = None
    tokenizer: Path | None = None
    dtype: DType = "model"
    sp_size: int | None = None
    seed: int = 0
    out: Place | None = None
    trust_run: bool = False

    @property
    def run_dir(self) -> Place | None:
        """Return the run's directory; None for a model directory."""
        return self.model if self.is_run else None

    @property
    def model_dir(self) -> Path | None:
        """Return the model directory, which is local; None for a run."""
        return self.model if isinstance(self.model, Path) and not self.is_run else None

    @classmethod
    def from_options(
        cls,
        model: Place,
        *,
        step: str,
        task: str,
        lengths: str | None,
        depths: int,
        cases: int,
        max_tokens: int,
        data: str | None,
        tokenizer: Path | None,
        dtype: str,
        sp_size: int | None,
        seed: int,
        out: str | None,
        trust_run: bool = False,
    ) -> EvaluationRequest:
        """Parse the options as typed.

        Raises:
            UserError: Names the invalid option and its valid values.
        """
        is_run = _is_run(model)
        if not is_run and step != "latest":
            raise UserError(f"--step={step}: is for a run, and {model} is a model directory; leave it out")
        if task not in (*TASKS, "all"):
            raise UserError(f"--task={task}: must be one of {', '.join(TASKS)}, all")
        dtypes: tuple[DType, ...] = get_args(DType)
        if dtype not in dtypes:
            raise UserError(f"--dtype={dtype}: must be one of {', '.join(dtypes)}")
        for name, value in (("--depths", depths), ("--cases", cases), ("--max-tokens", max_tokens)):
            if value < 1:
                raise UserError(f"{name}={value}: must be at least 1")
        if sp_size is not None and sp_size < 1:
            raise UserError(f"--sp-size={sp_size}: must be at least 1, the number of processes that share a row")
        if seed < 0:
            raise UserError(f"--seed={seed}: must be at least 0")
        return cls(
            model=model,
            is_run=is_run,
            step=parse_step(step),
            tasks=tuple(one for one in TASKS if task in (one, "all")),
            lengths=() if lengths is None else parse_lengths(lengths),
            depths=depths,
            cases=cases,
            max_tokens=max_tokens,
            data=None if data is None else place_of(data),
            tokenizer=tokenizer,
            dtype=next(one for one in dtypes if one == dtype),
            sp_size=sp_size,
            seed=seed,
            out=None if out is None else place_of(out),
            trust_run=trust_run,
        )


def _is_run(model: Place) -> bool:
    if (model / CONFIG_FILE).is_file():
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


def parse_lengths(text: str) -> tuple[int, ...]:
    """Return the numbers of tokens of ``--lengths``, ascending and each once: ``1k,4k`` is 1024 and 4096.

    Raises:
        UserError: One is not a number of tokens, or too small.
    """
    found = set()
    for part in text.split(","):
        match = _LENGTH.match(part.strip())
        value = int(match[1]) * _UNITS[match[2].lower()] if match else 0
        if value < _SHORTEST:
            raise UserError(
                f"--lengths={text[:40]}: {part.strip()[:20]!r} is not a number of tokens of {_SHORTEST} or more; write "
                "them as 1024 or 1k, with commas between, such as 1k,4k,16k"
            )
        found.add(value)
    return tuple(sorted(found))


def default_lengths(context_tokens: int) -> tuple[int, ...]:
    """Return 1k, 4k, 16k and so on below the context, and the context (pure)."""
    found = []
    length = 2**10
    while length < context_tokens:
        found.append(length)
        length *= 4
    return (*found, context_tokens)
