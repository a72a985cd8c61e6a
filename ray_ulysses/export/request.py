"""The options of an export, parsed from the command line (pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ray_ulysses.errors import UserError
from ray_ulysses.storage.place import Place

WeightType = Literal["model", "fp32", "bf16", "fp16"]
"""Precision of the exported weights; ``model`` is that of the training."""

StepChoice = int | Literal["latest", "best"]

# Bounded, since Python refuses to convert numbers of any length.
_SIZE = re.compile(r"^(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?i?b)$", re.IGNORECASE | re.ASCII)
_STEP = re.compile(r"^[0-9]{1,15}$")
_MOST_SHOWN = 40
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """The options of an export.

    Attributes:
        run_dir: The run's directory.
        step: The checkpoint.
        out: Directory to publish; None for ``export/step-XXXXXXXX`` in the run's directory.
        weights: Precision of the weights.
        max_shard_bytes: Maximum bytes of tensors in one file; a larger tensor has a file of its own.
        tokenizer: Directory whose tokenizer is added; None for the one that prepared the run's corpus.
        check: Whether to load the directory and compare it with the live model before it is published.
        overwrite: Whether another export at ``out`` is replaced.
        merge: Whether an adapter is merged into the weights that it adapts.
        trust_run: Whether the file of secrets and the servers that only the run names are used.
    """

    run_dir: Place
    step: StepChoice = "latest"
    out: Path | None = None
    weights: WeightType = "model"
    max_shard_bytes: int = 5 * 10**9
    tokenizer: Path | None = None
    check: bool = True
    overwrite: bool = False
    merge: bool = False
    trust_run: bool = False

    @classmethod
    def from_options(
        cls,
        run_dir: Place,
        *,
        step: str,
        out: Path | None,
        dtype: str,
        max_shard_size: str,
        tokenizer: Path | None,
        check: bool,
        overwrite: bool,
        merge: bool = False,
        trust_run: bool = False,
    ) -> ExportRequest:
        """Parse the options as typed.

        Raises:
            UserError: Names the invalid option and its valid values.
        """
        if out is not None and re.match(r"^[a-z0-9+]+:/", str(out)):
            raise UserError(f"--out={str(out)!r}: is a URI; give a local directory")
        return cls(
            run_dir=run_dir,
            step=parse_step(step),
            out=out,
            weights=_parse_weights(dtype),
            max_shard_bytes=parse_size(max_shard_size),
            tokenizer=tokenizer,
            check=check,
            overwrite=overwrite,
            merge=merge,
            trust_run=trust_run,
        )


def parse_step(text: str) -> StepChoice:
    """Return the checkpoint of ``--step``.

    Raises:
        UserError: It is neither a step, nor ``latest``, nor ``best``.
    """
    if text in ("latest", "best"):
        return "latest" if text == "latest" else "best"
    if not _STEP.match(text):
        raise UserError(f"--step={_shown(text)}: must be the number of a committed step, or latest, or best")
    return int(text)


def parse_size(text: str) -> int:
    """Return a size in bytes: ``5GB`` is 5e9, as Hugging Face counts, ``5GiB`` is 5 x 2^30.

    Raises:
        UserError: It is not a size, or less than a byte.
    """
    match = _SIZE.match(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if size < 1:
        raise UserError(f"--max-shard-size={_shown(text)}: must be a number and a unit, such as 5GB, 500MB or 2GiB")
    return size


def _shown(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _parse_weights(text: str) -> WeightType:
    choices: tuple[WeightType, ...] = get_args(WeightType)
    for choice in choices:
        if choice == text:
            return choice
    raise UserError(f"--dtype={text}: must be one of {', '.join(choices)}")
