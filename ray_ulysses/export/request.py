"""What an export is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ray_ulysses.storage.place import Place

WeightType = Literal["model", "fp32", "bf16", "fp16"]
"""Precision of the exported weights; ``model`` is that of the training."""

StepChoice = int | Literal["latest", "best"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """The options of an export."""

    run_dir: Place
    step: StepChoice = "latest"
    out: Path | None = None
    """Directory to publish; None for ``export/step-XXXXXXXX`` in the run's directory."""
    weights: WeightType = "model"
    max_shard_bytes: int = 5 * 10**9
    """Maximum bytes of tensors in one file; a larger tensor has a file of its own."""
    tokenizer: Path | None = None
    """Directory whose tokenizer is added; None for the one that prepared the run's corpus."""
    check: bool = True
    """Whether to load the directory and compare it with the live model before it is published."""
    overwrite: bool = False
    """Whether another export at ``out`` is replaced."""
    merge: bool = False
    trust_run: bool = False
    """Whether the file of secrets and the servers that only the run names are used."""
