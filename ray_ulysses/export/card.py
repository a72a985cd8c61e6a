"""Writes the model card, README.md: what was trained, on what, with which settings, and with what result."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_ulysses.checkpoint.manifest import Manifest
from ray_ulysses.config import Config
from ray_ulysses.export.report import (
    ExportReport,
    TrainingFacts,
    average_words,
    context_words,
    python_lines,
    serve_line,
)
from ray_ulysses.export.sentences import MODULES_FILE
from ray_ulysses.inspect.run_data import plan_if_readable
from ray_ulysses.run.settings import flat_settings
from ray_ulysses.storage.hub import is_id
from ray_ulysses.storage.location import expand_home
from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.events import Evaluated
from ray_ulysses.tracking.journal_reader import read_journal

CARD_FILE = "README.md"
_LICENSE = re.compile(r"^[a-z0-9][a-z0-9.\-]{0,63}$")
_PIPELINES = {
    "AutoModel": "sentence-similarity",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
}
"""Pipeline tag on the Hub, by the class that loads the model."""
_SETTINGS: dict[str, Any] = {
    "optimizer": True,
    "schedule": True,
    "data": {"rows_per_step", "packing"},
    "model": {"dtype": True, "adapter": True},
    "run": {"seed", "plugins"},
}


def training_facts(config: Config, manifest: Manifest, run_dir: Place) -> TrainingFacts:
    """Collect what the model card says about the training that led to a checkpoint, without local paths.

    Args:
        config: Configuration of the stage that trained the checkpoint.
        manifest: The checkpoint.
        run_dir: The run's directory, whose plan and journal may be missing or damaged.
    """
    model, prepare, plan = config.model, config.data.prepare, plan_if_readable(run_dir)
    base = str(model.path) if model.init == "pretrained" and model.path is not None else None
    sources = prepare.sources if prepare is not None and prepare.kind in ("auto", "datasets") else ()
    settings = config.model_dump(mode="json", include=_SETTINGS, exclude_none=True)
    settings["model"].get("adapter", {}).pop("from", None)  # may be a local path
    settings["objective"] = config.objective.own_settings()
    return TrainingFacts(
        base_model=base if base is not None and _is_on_the_hub(base) else None,
        datasets=tuple(one for one in sources if "/" in one and not Path(one).suffix and _is_on_the_hub(one)),
        license=None if base is None else _license_of(base),
        planned_steps=plan.num_steps if plan is not None and plan.num_steps >= manifest.step else None,
        loss=manifest.meta.metrics.get("loss"),
        validation=_validation(config, manifest, run_dir),
        settings={name: str(value) for name, value in flat_settings(settings).items() if value != []},
    )


def _is_on_the_hub(name: str) -> bool:
    return is_id(name) and not expand_home(name).exists()


def _license_of(base: str) -> str | None:
    """Return the license in the base model's card, if the card is on this machine."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.repocard import metadata_load

    file = expand_home(base) / CARD_FILE
    if not file.is_file():
        cached = try_to_load_from_cache(base, CARD_FILE) if is_id(base) else None
        if not isinstance(cached, str):
            return None
        file = Path(cached)
    try:
        found = (metadata_load(file) or {}).get("license")
    except Exception:  # somebody else's YAML raises errors of many types
        return None
    return found if isinstance(found, str) and _LICENSE.match(found) else None


def _validation(config: Config, manifest: Manifest, run_dir: Place) -> tuple[int, float] | None:
    """Return step and loss of the last evaluation up to a checkpoint."""
    if (loss := manifest.meta.metrics.get("eval_loss")) is not None:
        return manifest.step, loss
    if config.run.eval_every_steps is None:
        return None
    try:
        entries = read_journal(run_dir).entries
    except OSError:
        return None
    found = [one for one in entries if isinstance(one, Evaluated) and one.step <= manifest.step]
    last = max(found, key=lambda one: (one.step, one.attempt), default=None)
    return None if last is None else (last.step, last.loss)


def model_card(report: ExportReport) -> bytes:
    """Render the model card, README.md."""
    from huggingface_hub import ModelCardData

    facts = report.training
    library = "peft" if report.adapter else "transformers"
    library = "sentence-transformers" if MODULES_FILE in report.files else library
    front = ModelCardData(
        base_model=facts.base_model,
        datasets=list(facts.datasets) or None,
        license=facts.license,
        library_name=library,
        pipeline_tag=_PIPELINES.get(report.loaded_with, "text-generation"),
        tags=["ray-ulysses", "long-context", *(["lora"] if report.adapter else [])],
    )
    checked = "It was not compared with the live model (`--no-check`)."
    if report.check is not None:
        checked = f"It was loaded and compared with the live model: {report.check.words}."
    lines = [
        "---",
        front.to_yaml(),
        "---",
        "",
        f"# {report.run}, step {report.step:,}",
        "",
        "Trained with ray-ulysses: full attention over the whole context, every planned row "
        f"up to step {report.step:,} once.",
        "",
        *_table(_rows(report)),
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
        "",
        "## Settings",
        "",
        *_table({f"`{name}`": f"`{one}`" for name, one in facts.settings.items()}),
    ]
    return ("\n".join(lines) + "\n").encode()


def _rows(report: ExportReport) -> dict[str, str]:
    facts = report.training
    steps = f"{report.step:,}" if facts.planned_steps is None else f"{report.step:,} of {facts.planned_steps:,} steps"
    note = ", before averaging" if report.averaged_steps else ""
    counted = "tokens" if report.loaded_with == "AutoModelForMaskedLM" else "supervised tokens"
    versions = ", ".join(f"{name} {version}" for name, version in sorted(report.versions.items()))
    rows = {
        "run": f"`{report.run}`, attempt {report.attempt}",
        "base model": "" if facts.base_model is None else f"`{facts.base_model}`",
        "trained": f"{steps}, {report.trained_tokens:,} {counted}",
        "average": average_words(report) if report.averaged_steps else "",
        "training loss": "" if facts.loss is None else f"{facts.loss:.4f}{note}",
        "validation loss": "{1:.4f} at step {0:,}{2}".format(*facts.validation, note) if facts.validation else "",
        "data digest": f"`{report.data_digest}`",
        "context": context_words(report),
        "weights": f"{report.architecture}, {report.parameters:,} parameters, {report.weights}",
        "tokenizer": report.tokenizer,
        "versions": versions or "not recorded",
    }
    return {name: value for name, value in rows.items() if value}


def _table(rows: Mapping[str, str]) -> list[str]:
    return ["| | |", "|---|---|", *[f"| {name} | {value} |" for name, value in rows.items()]]
