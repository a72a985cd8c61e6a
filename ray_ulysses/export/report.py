"""Options of an export, and its report."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ray_ulysses.config.reference_to_checkpoint import Which
from ray_ulysses.storage.place import Place

# The values that vLLM's --max-lora-rank accepts.
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


WeightType = Literal["model", "fp32", "bf16", "fp16"]
"""Precision of the exported weights; ``model`` is the training precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """Options of an export."""

    run_dir: Place
    step: Which = "latest"
    out: Path | None = None
    """Directory to publish; None for ``export/step-XXXXXXXX`` in the run directory."""
    weights: WeightType = "model"
    max_shard_bytes: int = 5 * 10**9
    """Maximum tensor bytes per file. A larger tensor gets a separate file."""
    tokenizer: Path | None = None
    """Directory of the tokenizer to include; None for the tokenizer that prepared the run's corpus."""
    check: bool = True
    """Whether to load the directory and compare it with the live model before publishing."""
    overwrite: bool = False
    """Whether to replace another export at ``out``."""
    merge: bool = False
    average: int = 1
    """Number of checkpoints, up to ``step``, whose weights are averaged."""
    trust_run: bool = False
    """Whether to trust the secrets file and servers that only the run's stored configuration specifies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """Result of comparing an exported directory with the live model."""

    tokens: int
    """Number of tokens whose logits were compared."""
    documents: int
    origin: str
    """Description of the documents' source."""
    difference: float
    """Largest absolute difference between two logits."""
    scale: float
    """Largest absolute logit of the live model."""
    bound: float
    """Largest allowed ratio ``difference / scale``."""

    @property
    def relative(self) -> float:
        """The largest logit difference, relative to the largest logit."""
        return self.difference / self.scale if self.scale else self.difference

    @property
    def words(self) -> str:
        """The result as a clause for messages."""
        where = f"over {self.tokens} tokens of {self.documents} documents ({self.origin})"
        if self.difference == 0:
            return f"its logits {where} equal the live model's bit for bit"
        return (
            f"its logits {where} differ from the live model's by {self.relative:.1e} relative to the largest logit; "
            f"the bound is {self.bound:.0e}"
        )

    @property
    def holds(self) -> bool:
        """Whether the difference is within the bound; False for NaN."""
        return self.relative <= self.bound


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFacts:
    """Properties of an adapter that PEFT and vLLM need."""

    base: str
    """Hub id or directory of the base model."""
    rank: int
    """The largest rank."""
    has_modules: bool
    """Whether fully trained modules, such as embeddings and norms, are saved with the adapter."""
    is_dora: bool = False
    base_class: str = "AutoModelForCausalLM"
    """Transformers class that loads the base model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFacts:
    """The training that led to an exported checkpoint. Unknown facts are omitted."""

    base_model: str | None = None
    """Hub id of the base model."""
    datasets: tuple[str, ...] = ()
    """Hub ids of the training data."""
    license: str | None = None
    """License of the base model, from its card."""
    planned_steps: int | None = None
    """Number of steps in the run's data plan."""
    loss: float | None = None
    """Training loss at the step."""
    validation: tuple[int, float] | None = None
    """Step and loss of the last evaluation."""
    settings: dict[str, str] = field(default_factory=dict)
    """Values of the settings that affect what the model learns, by path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """Report about one export."""

    run: str
    step: int
    attempt: int
    """Attempt that committed the checkpoint."""
    trained_tokens: int
    """Number of supervised tokens in training up to the step."""
    data_digest: str
    """Sum of the digests of all training data up to the step, as 16 hexadecimal digits."""
    out: str
    architecture: str
    parameters: int
    weights: str
    """Description of the weights' precision."""
    files: dict[str, int]
    """Size in bytes of each file, by file name."""
    context_tokens: int
    """Length of the longest training row, in tokens."""
    max_positions: int | None
    """The model's ``max_position_embeddings``, as in training; None if the model has none."""
    rope: str
    """Description of the rotary embedding, or an empty string if there is none."""
    tokenizer: str
    """Description of the tokenizer's source."""
    published_tokenizer: str
    """The same description without local paths, for recipients of the directory."""
    has_tokenizer: bool
    versions: dict[str, str]
    """Versions of the libraries that wrote the checkpoint."""
    check: CheckResult | None
    """Result of the check; None if the check was skipped."""
    seconds: float
    was_there: bool
    """Whether an identical export already existed, in which case nothing was written."""
    loaded_with: str = "AutoModelForCausalLM"
    """Transformers or PEFT class that loads the directory."""
    adapter: AdapterFacts | None = None
    """The exported adapter; None for a complete model."""
    averaged_steps: tuple[int, ...] = ()
    """Steps of the averaged checkpoints, ascending; empty without an average."""
    training: TrainingFacts = field(default_factory=TrainingFacts)

    def published(self) -> ExportReport:
        """Return the report to store in the directory, without local paths."""
        check = self.check and replace(self.check, origin=self.check.origin.partition(", since ")[0])
        return replace(self, out="", tokenizer=self.published_tokenizer, check=check)

    @property
    def num_bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(self.files.values())

    @property
    def weight_files(self) -> int:
        """Number of weight files."""
        return sum(name.endswith(".safetensors") for name in self.files)

    @property
    def serving_tokens(self) -> int:
        """Longest context that both training and the model configuration support, in tokens."""
        return min(self.context_tokens, self.max_positions or self.context_tokens)


def decimal_size(num_bytes: int) -> str:
    """Format a size in the decimal units of ``--max-shard-size``, such as ``16.1 GB`` or ``740 MB``."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} B"


def average_words(report: ExportReport) -> str:
    """Name the checkpoints that were averaged."""
    return f"mean of the checkpoints of steps {', '.join(f'{step:,}' for step in report.averaged_steps)}"


def context_words(report: ExportReport) -> str:
    """Describe the context length of the training and the model configuration."""
    words = f"rows of up to {report.context_tokens:,} tokens"
    if report.max_positions is not None:
        words += f"; max_position_embeddings {report.max_positions:,}"
    if report.rope:
        words += f", {report.rope}"
    return f"{words}, as trained"


def python_lines(report: ExportReport, path: str) -> list[str]:
    """Return the Python lines that load an exported directory."""
    quoted = json.dumps(path, ensure_ascii=False)
    classes, imports, lines = [report.loaded_with], [], []
    if report.adapter is None:
        lines.append(f'model = {report.loaded_with}.from_pretrained({quoted}, dtype="auto")')
    elif report.adapter.base_class != "AutoModelForCausalLM":
        classes, imports = [report.adapter.base_class], ["from peft import PeftModel"]
        base = json.dumps(report.adapter.base, ensure_ascii=False)
        lines += [
            f'base = {report.adapter.base_class}.from_pretrained({base}, dtype="auto")',
            f"model = PeftModel.from_pretrained(base, {quoted})",
        ]
    elif "config.json" not in report.files:
        classes, imports = [], [f"from peft import {report.loaded_with}"]
        lines.append(f'model = {report.loaded_with}.from_pretrained({quoted}, dtype="auto")')
    else:
        # Load the base model with the training's rotary positions.
        classes, imports = ["AutoConfig", "AutoModelForCausalLM"], ["from peft import PeftConfig, PeftModel"]
        lines += [
            f"base = PeftConfig.from_pretrained({quoted}).base_model_name_or_path",
            f"config = AutoConfig.from_pretrained({quoted})",
            'base = AutoModelForCausalLM.from_pretrained(base, config=config, dtype="auto")',
            f"model = PeftModel.from_pretrained(base, {quoted})",
        ]
    if report.adapter is not None and "generation_config.json" in report.files:
        # By default PEFT uses the base model's generation settings, which may have other end tokens.
        classes.append("GenerationConfig")
        lines.append(f"model.generation_config = GenerationConfig.from_pretrained({quoted})")
    if report.has_tokenizer:
        classes.append("AutoTokenizer")
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({quoted})")
    return [*imports, *([f"from transformers import {', '.join(classes)}"] if classes else []), *lines]


def serve_line(report: ExportReport, path: str) -> str:
    """Return the command that serves the directory with vLLM, or a comment that explains why vLLM can't."""
    folder, adapter = shlex.quote(path), report.adapter
    length = f"--max-model-len {report.serving_tokens}"
    if report.loaded_with in ("AutoModel", "AutoModelForMaskedLM", "AutoModelForSequenceClassification"):
        return "# The model does not generate text: load it in Python as shown above"
    if adapter is None:
        return f"vllm serve {folder} {length}"
    rank = min((rank for rank in _VLLM_RANKS if rank >= adapter.rank), default=None)
    if adapter.has_modules or adapter.is_dora or rank is None:
        why = f"a rank above {_VLLM_RANKS[-1]}" if rank is None else "fully trained modules such as embeddings or norms"
        why = "DoRA" if adapter.is_dora else why
        return f"# vLLM does not load adapters with {why}: serve a complete model from `ray-ulysses export --merge`"
    options = ["--enable-lora", f"--max-lora-rank {rank}", f"--lora-modules adapter={folder}", length]
    if "config.json" in report.files:
        options.append(f"--hf-config-path {folder}")
    if "generation_config.json" in report.files:
        options.append(f"--generation-config {folder}")
    return f"vllm serve {shlex.quote(adapter.base)} {' '.join(options)}"
