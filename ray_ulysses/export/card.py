"""Renders the model card of an exported directory (pure)."""

from __future__ import annotations

import json
import shlex

from ray_ulysses.export.report import ExportReport

_FRONT = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- ray-ulysses\n- long-context\n---\n"
# Of its option --max-lora-rank.
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def model_card(report: ExportReport) -> bytes:
    """Return README.md."""
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
    """Return the context of the training and that of the configuration in words."""
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
        # PEFT reads it from the base model, which may end elsewhere.
        classes.append("GenerationConfig")
        lines.append(f"model.generation_config = GenerationConfig.from_pretrained({quoted})")
    if report.has_tokenizer:
        classes.append("AutoTokenizer")
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({quoted})")
    return [*imports, *([f"from transformers import {', '.join(classes)}"] if classes else []), *lines]


def serve_line(report: ExportReport, path: str) -> str:
    """Return the command that serves a directory with vLLM, or a comment that says why it can't."""
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
