"""Renders the answers of ``ray-ulysses plan --longest`` and ``--fit``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray_ulysses.config import Config
from ray_ulysses.config.resume import setting
from ray_ulysses.planner.search import Change, Chosen, Found, LongestContexts, yaml_value
from ray_ulysses.report.words import as_text, duration, facts, size, wrapped

_WIDTH = 100


def render_longest(lengths: LongestContexts) -> str:
    """Return the longest contexts that fit, and what to change for the longest of all."""
    changed, configured = lengths.changed, lengths.configured
    if changed is None:
        return "no context fits, as configured or with any setting; use a smaller model or more workers"
    most = changed.config.data.context_tokens
    lines = [
        f"longest context that fits, {changed.memory.note} (a multiple of {lengths.multiple:,} tokens)",
        *facts(
            [
                ("as configured", f"{configured:,} tokens" if configured else "none fits"),
                ("with changed settings", f"{most:,} tokens" if most > configured else "no more than that"),
            ]
        ),
    ]
    return as_text(lines if most == configured else [*lines, *_changes(changed), *_needs(changed)])


def render_fit(config: Config, near: Found | None, hint: str, chosen: Sequence[Chosen]) -> str:
    """Return the nearest settings that fit, with the reason for each, as options and as YAML."""
    context = f"{config.data.context_tokens:,} tokens"
    said = [line for one in chosen for line in wrapped(f"chosen: {one}", _WIDTH)]
    if near is None:
        return as_text([f"{context} do not fit", *said, *wrapped(hint, _WIDTH)])
    if not near.changes:
        return as_text([f"{context} fit as configured: there is nothing to change", *said, *_needs(near)])
    return as_text(
        [
            f"nearest settings with which {context} fit, {near.memory.note}",
            *said,
            *_changes(near),
            *_needs(near),
            "as YAML",
            *_yaml(near),
        ]
    )


def longest_json(lengths: LongestContexts) -> dict[str, Any]:
    """Return the longest contexts as plain values."""
    return {"configured": lengths.configured, "changed": _json(lengths.changed)}


def fit_json(near: Found | None, hint: str) -> dict[str, Any]:
    """Return the nearest settings as plain values."""
    return {"nearest": _json(near), "problem": hint or None}


def _json(found: Found | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "context_tokens": found.config.data.context_tokens,
        "settings": {change.path: change.new for change in found.changes},
        "device_bytes": found.memory.device_bytes,
        "host_bytes": found.memory.host_bytes,
        "step_s": None if found.time is None else found.time.seconds,
    }


def _changes(found: Found) -> list[str]:
    return facts([(change.option(), _reason(change)) for change in found.changes])


def _reason(change: Change) -> str:
    if change.before == change.after:
        # Such as activations that are not offloaded any more because they are not kept any more.
        return f"{yaml_value(change.old)} does not go with the settings above"
    after = size(change.after) if change.after else "none"
    return f"{change.term} ({change.place}): {size(change.before)} with {yaml_value(change.old)}, then {after}"


def _needs(found: Found) -> list[str]:
    limits, memory = found.config.memory, found.memory
    rows = [
        (name, size(taken) + (f" of {limit:g} GiB" if limit else ""))
        for name, taken, limit in (
            ("device", memory.device_bytes, limits.device_gib),
            ("host", memory.host_bytes, limits.host_gib),
        )
    ]
    if found.time is not None:
        rows.append(("step", f"{duration(found.time.seconds)} if each row is one document, modelled"))
    return facts(rows)


def _yaml(found: Found) -> list[str]:
    sections: dict[str, list[str]] = {}
    for change in found.changes:
        section, _, name = change.path.partition(".")
        value = yaml_value(setting(found.config, change.path))
        sections.setdefault(section, []).append(f"    {name}: {value}")
    return [line for name, lines in sections.items() for line in (f"  {name}:", *lines)]
