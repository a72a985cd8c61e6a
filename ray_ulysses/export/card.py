"""Renders the model card of an exported directory (pure)."""

from __future__ import annotations

import json
import shlex

from ray_ulysses.export.report import ExportReport

_FRONT = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- ray-ulysses\n- long-context\n---\n"


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
        "Trained with ray-ulysses: full attention over the whole context, every planned row once.",
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
    return (_FRONT + "\n" + "\n".join(lines) + "\n").encode()


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
    classes, quoted = report.loaded_with, json.dumps(path, ensure_ascii=False)
    lines = [f'model = {report.loaded_with}.from_pretrained({quoted}, dtype="auto")']
    if report.has_tokenizer:
        classes += ", AutoTokenizer"
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({quoted})")
    return [f"from transformers import {classes}", *lines]


def serve_line(report: ExportReport, path: str) -> str:
    """Return the command that serves a directory with vLLM."""
    return f"vllm serve {shlex.quote(path)} --max-model-len {report.serving_tokens}"
