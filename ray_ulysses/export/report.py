"""The options of an export, the report on it, and the model card that is rendered from the report."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ray_ulysses.config.reference_to_checkpoint import Which
from ray_ulysses.storage.place import Place

_FRONT = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- ray-ulysses\n- long-context\n---\n"
# The values that vLLM's --max-lora-rank accepts.
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


WeightType = Literal["model", "fp32", "bf16", "fp16"]
"""Precision of the exported weights; ``model`` means the precision of the training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """The options of an export."""

    run_dir: Place
    step: Which = "latest"
    out: Path | None = None
    """Directory to publish; None for ``export/step-XXXXXXXX`` in the run's directory."""
    weights: WeightType = "model"
    max_shard_bytes: int = 5 * 10**9
    """Maximum bytes of tensors in one file; a larger tensor gets a file to itself."""
    tokenizer: Path | None = None
    """Directory whose tokenizer is added; None for the one that prepared the run's corpus."""
    check: bool = True
    """Whether to load the directory and compare it with the live model before it is published."""
    overwrite: bool = False
    """Whether another export at ``out`` is replaced."""
    merge: bool = False
    trust_run: bool = False
    """Whether to use the secrets file and the servers that only the run names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """The comparison of an exported directory with the live model."""

    tokens: int
    """Tokens whose logits were compared."""
    documents: int
    origin: str
    """Their source, in words."""
    difference: float
    scale: float
    """Largest logit of the live model."""
    bound: float
    """Largest allowed ``difference / scale``."""

    @property
    def relative(self) -> float:
        """Return the largest difference as a share of the largest logit."""
        return self.difference / self.scale if self.scale else self.difference

    @property
    def words(self) -> str:
        """Return the outcome in words."""
        where = f"over {self.tokens} tokens of {self.documents} documents ({self.origin})"
        if self.difference == 0:
            return f"its logits {where} are bitwise those of the live model"
        return (
            f"its logits {where} differ from the live model's by {self.relative:.1e} of the largest; "
            f"{self.bound:.0e} is allowed"
        )

    @property
    def holds(self) -> bool:
        """Return whether the two are the same model; NaN is not."""
        return self.relative <= self.bound


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFacts:
    """Facts about an adapter that other tools need."""

    base: str
    """Name or directory of the base model."""
    rank: int
    has_modules: bool
    """Whether modules such as embeddings and norms were trained in full and are saved with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """One export."""

    run: str
    step: int
    attempt: int
    """Attempt that committed the checkpoint."""
    trained_tokens: int
    """Supervised tokens trained on up to the step."""
    data_digest: str
    """Sum of the digests of all data up to the step, 16 hexadecimal digits."""
    out: str
    architecture: str
    parameters: int
    weights: str
    """Precision of the files, in words."""
    files: dict[str, int]
    """Their sizes in bytes, by name."""
    context_tokens: int
    """Longest row of the training."""
    max_positions: int | None
    """``max_position_embeddings``, unchanged; None where the model has none."""
    rope: str
    """Description of its rotary embedding; empty if it has none."""
    tokenizer: str
    """Source of the tokenizer, in words."""
    published_tokenizer: str
    """The same for recipients of the directory, without paths of the machine that exported it."""
    has_tokenizer: bool
    versions: dict[str, str]
    """Versions of the libraries that wrote the checkpoint."""
    check: CheckResult | None
    """The result of the check; None if it was skipped."""
    seconds: float
    was_there: bool
    """Whether the same export existed already, so that nothing was written."""
    loaded_with: str = "AutoModelForCausalLM"
    """The class of Transformers or PEFT that loads the directory."""
    adapter: AdapterFacts | None = None
    """The adapter that the directory holds; None for a whole model."""

    def published(self) -> ExportReport:
        """Return the report for the directory, without paths of the machine that exported it."""
        check = self.check and replace(self.check, origin=self.check.origin.partition(", since ")[0])
        return replace(self, out="", tokenizer=self.published_tokenizer, check=check)

    @property
    def num_bytes(self) -> int:
        """Return the size of all files."""
        return sum(self.files.values())

    @property
    def weight_files(self) -> int:
        """Return the number of weight files."""
        return sum(name.endswith(".safetensors") for name in self.files)

    @property
    def serving_tokens(self) -> int:
        """Return the longest context that both the training and the configuration cover."""
        return min(self.context_tokens, self.max_positions or self.context_tokens)


def decimal_size(num_bytes: int) -> str:
    """Return a size in decimal units, as ``--max-shard-size`` counts: ``16.1 GB``, ``740 MB``."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} B"


def model_card(report: ExportReport) -> bytes:
    """Render the model card, README.md."""
    checked = "It was not compared with the live model (`--no-check`)."
    if report.check is not None:
        checked = f"It was loaded and compared with the live model: {report.check.words}."
    rows = [
        ("run", f"`{report.run}`, attempt {report.attempt}"),
        ("step", f"{report.step:,}"),
        ("trained tokens", f"{report.trained_tokens:,} with a label"),
        ("data digest", f"`{report.data_digest}`"),
        ("context", context_words(report)),
        ("weights", f"{report.architecture}, {report.parameters:,} parameters, {report.weights}"),
        ("tokenizer", report.tokenizer),
        (
            "versions",
            ", ".join(f"{name} {version}" for name, version in sorted(report.versions.items())) or "not recorded",
        ),
    ]
    lines = [
        f"# {report.run}, step {report.step:,}",
        "",
        "Trained with ray-ulysses: full attention over the whole context, every planned row "
        f"up to step {report.step:,} once.",
        "",
        "| | |",
        "|---|---|",
        *[f"| {name} | {value} |" for name, value in rows],
        "",
        checked,
        "",
        "```python",
        *python_lines(report, "."),
        "```",
        "",
        "```sh",
        serve_line(report, "."),
        "```",
    ]
    front = _FRONT.replace("transformers", "peft", 1) if report.adapter else _FRONT
    return (front + "\n" + "\n".join(lines) + "\n").encode()


def context_words(report: ExportReport) -> str:
    """Describe the context of the training and of the configuration."""
    words = f"rows of up to {report.context_tokens:,} tokens"
    if report.max_positions is not None:
        words += f"; max_position_embeddings {report.max_positions:,}"
    if report.rope:
        words += f", {report.rope}"
    return f"{words}, as trained"


def python_lines(report: ExportReport, path: str) -> list[str]:
    """Return the Python lines that load a directory."""
    quoted = json.dumps(path, ensure_ascii=False)
    classes, imports, lines = [report.loaded_with], [], []
    if report.adapter is None:
        lines.append(f'model = {report.loaded_with}.from_pretrained({quoted}, dtype="auto")')
    elif "config.json" not in report.files:
        classes, imports = [], [f"from peft import {report.loaded_with}"]
        lines.append(f'model = {report.loaded_with}.from_pretrained({quoted}, dtype="auto")')
    else:
        # The base model with the positions of the training.
        classes, imports = ["AutoConfig", "AutoModelForCausalLM"], ["from peft import PeftConfig, PeftModel"]
        lines += [
            f"base = PeftConfig.from_pretrained({quoted}).base_model_name_or_path",
            f"config = AutoConfig.from_pretrained({quoted})",
            'base = AutoModelForCausalLM.from_pretrained(base, config=config, dtype="auto")',
            f"model = PeftModel.from_pretrained(base, {quoted})",
        ]
    if report.adapter is not None and "generation_config.json" in report.files:
        # PEFT would use the base model's, which may have other end tokens.
        classes.append("GenerationConfig")
        lines.append(f"model.generation_config = GenerationConfig.from_pretrained({quoted})")
    if report.has_tokenizer:
        classes.append("AutoTokenizer")
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({quoted})")
    return [*imports, *([f"from transformers import {', '.join(classes)}"] if classes else []), *lines]


def serve_line(report: ExportReport, path: str) -> str:
    """Return the command that serves a directory with vLLM, or a comment with the reason why vLLM can't."""
    folder, adapter = shlex.quote(path), report.adapter
    length = f"--max-model-len {report.serving_tokens}"
    if adapter is None:
        return f"vllm serve {folder} {length}"
    rank = min((rank for rank in _VLLM_RANKS if rank >= adapter.rank), default=None)
    if adapter.has_modules or rank is None:
        why = f"a rank above {_VLLM_RANKS[-1]}" if rank is None else "trained embeddings, norms or other whole modules"
        return f"# vLLM does not load adapters with {why}: serve the whole model, from `ray-ulysses export --merge`"
    options = ["--enable-lora", f"--max-lora-rank {rank}", f"--lora-modules adapter={folder}", length]
    if "config.json" in report.files:
        options.append(f"--hf-config-path {folder}")
    if "generation_config.json" in report.files:
        options.append(f"--generation-config {folder}")
    return f"vllm serve {shlex.quote(adapter.base)} {' '.join(options)}"
