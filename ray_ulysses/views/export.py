"""Renders the result of ``ray-ulysses export``."""

from __future__ import annotations

from ray_ulysses.export.card import context_words, python_lines, serve_line
from ray_ulysses.export.report import ExportReport, decimal_size
from ray_ulysses.report.words import as_text, count, duration, facts


def render_export(report: ExportReport) -> str:
    """Return the lines that ``ray-ulysses export`` prints."""
    done = "was exported before" if report.was_there else f"exported in {duration(report.seconds)}"
    rows = [
        ("directory", report.out),
        ("model", f"{report.architecture}, {count(report.parameters)} parameters"),
        ("weights", report.weights),
        ("files", _files(report)),
        ("context", context_words(report)),
        ("tokenizer", report.tokenizer),
        ("check", report.check.words if report.check is not None else "skipped (--no-check)"),
    ]
    serve = serve_line(report, report.out)
    lines = [
        f"run {report.run!r}, step {report.step:,} (attempt {report.attempt}, {count(report.trained_tokens)} trained "
        f"tokens): {done}",
        *facts(rows),
        *_warnings(report),
        "",
        *python_lines(report, report.out),
        serve if serve.startswith("#") else f"# or: {serve}",
    ]
    return as_text(lines)


def _files(report: ExportReport) -> str:
    single = "adapter_model.safetensors" if report.adapter else "model.safetensors"
    files = f"{report.weight_files} of safetensors" if report.weight_files > 1 else single
    others = len(report.files) - report.weight_files
    return f"{files} and {others} more, {decimal_size(report.num_bytes)}"


def _warnings(report: ExportReport) -> list[str]:
    if report.max_positions is None or report.max_positions >= report.context_tokens:
        return []
    return [
        f"  note: the run trained on rows longer than max_position_embeddings={report.max_positions:,}, which is "
        "exported as trained; raise it in config.json if the model is to use longer contexts"
    ]
