"""The command ``plan``: predicts a run, compares layouts, and finds the longest context or settings that fit."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ray_ulysses.commands.options import AsJson, Branch, ConfigPath, Overrides, Quiet, load_run_config
from ray_ulysses.commands.output import Waiting, columns, put
from ray_ulysses.errors import ConfigError, UserError
from ray_ulysses.report.words import as_text, duration, facts, folded, size, table

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.planner.layouts import LayoutChoice
    from ray_ulysses.planner.search import Change, Chosen, Found, LongestContexts

EXAMPLE = "Example: ray-ulysses plan configs/llama-tiny_cpu_sp2-dp2_8k.yaml --set cluster.workers=8"
_WIDTH = 100
"""Width of the text where there is no terminal."""
_STYLES = {
    r"(?m)^run '.*": "bold",
    r"(?m)^\d+ problems?:": "bold red",
    r"(?m)^note:": "yellow",
    r"(?m)^  [a-z]+(?=  )": "bold",
    r"(?<=  )fits:": "bold green",
    r"(?<=  )does not fit:": "bold red",
    r"(?m)^more: .*": "dim",
}


def plan(
    config: ConfigPath,
    overrides: Overrides = [],  # noqa: B006
    branch: Branch = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    price: Annotated[float | None, typer.Option(help="Price per GPU and hour; adds the run's cost.", min=0.0)] = None,
    longest: Annotated[bool, typer.Option("--longest", help="Print the longest context that fits instead.")] = False,
    fit: Annotated[bool, typer.Option("--fit", help="Print the nearest settings that fit instead.")] = False,
    layouts: Annotated[
        bool, typer.Option("--layouts", help="Print the layouts that fit instead, from the fastest.")
    ] = False,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Assume document lengths if the corpus is not prepared yet.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Add each term of memory, time and data.")] = False,
) -> None:
    """Print whether a run fits and what it will take, without starting it. Exits with 2 if the run can't start.

    Needs no GPU and no network.
    """
    instead = [name for name, is_given in (("--layouts", layouts), ("--longest", longest), ("--fit", fit)) if is_given]
    of_report = {"--price": price is not None, "--branch": branch, "--verbose": verbose}
    ignored = [name for name, is_given in of_report.items() if is_given and instead] + instead[1:] * layouts
    if ignored:
        raise UserError(f"{instead[0]} can't be combined with {ignored[0]}; leave out one of the two")
    loaded = load_run_config(config, overrides, needs_corpus=False)
    width = columns(sys.stdout)
    with Waiting("planning", is_quiet=quiet):
        if layouts:
            text, can_start = _tell_layouts(loaded, Path.cwd(), as_json)
        elif longest or fit:
            text, can_start = _tell_fit(loaded, Path.cwd(), as_json, longest=longest, fit=fit)
        else:
            from ray_ulysses.report.plan import render_plan, render_verdict
            from ray_ulysses.run.preflight import report_run

            report = report_run(loaded, Path.cwd(), branch=branch, synthetic=synthetic)
            render = render_plan if verbose else render_verdict
            text = folded(render(report, price), width or _WIDTH)
            if as_json:
                text = json.dumps(report.to_json(), indent=2)
            can_start = not report.problems
    if as_json or width is None:
        put(text, is_exact=True)
    else:
        from ray_ulysses.commands.display import put_styled

        put_styled(folded(text, width), _STYLES)
    if not can_start:
        raise typer.Exit(2)


def _tell_layouts(config: Config, base: Path, as_json: bool) -> tuple[str, bool]:
    """Return the layouts that fit, the fastest first, and whether any layout fits."""
    from ray_ulysses.planner.layouts import compare_layouts
    from ray_ulysses.planner.problems import heads_problems
    from ray_ulysses.planner.settings import fits_rows
    from ray_ulysses.planner.throughput import not_predicted
    from ray_ulysses.run.preflight import load_stored_plan, planned_memory
    from ray_ulysses.run.stored_run import read_stored_run

    config = config.with_absolute_paths(base)
    stored = read_stored_run(config)
    plan = load_stored_plan(config, stored)
    planned, shape, _ = planned_memory(config, base, stored)
    if problems := tuple(heads_problems(planned, shape)):
        raise ConfigError(problems, source=f"run {config.run.name!r}")
    if missing := not_predicted(planned):
        raise UserError(f"--layouts compares predicted times, but no time is predicted {missing}")
    settled = None if plan is None else plan.settings
    found = compare_layouts(config, shape, settled, stored.config if stored.has_begun else None)
    if as_json:
        return json.dumps([_layout_json(one) for one in found], indent=2), bool(found)
    where = "into memory"
    if settled is not None and not fits_rows(config, shape, settled.pad_multiple):
        where = f"the stored rows, whose lengths are multiples of {settled.pad_multiple}"
    return _render_layouts(config, found, f"the configured layout does not fit {where}"), bool(found)


def _render_layouts(config: Config, found: Sequence[LayoutChoice], misfit: str) -> str:
    """Return the table of layouts. ``misfit`` says why the configured layout is not in ``found``, if it is not."""
    from ray_ulysses.planner.throughput import seconds_text

    workers = f"{config.cluster.workers.max} {config.cluster.device}"
    network = f"{config.cluster.gpus_per_node} per node, {config.cluster.network_gbps:g} Gbit/s per GPU between nodes"
    if not found:
        return f"no layout fits on {workers}; plan --fit looks for other settings"
    rows = [
        (
            seconds_text(one.time.seconds),
            size(one.memory.device_bytes),
            str(one.layout.dp_size),
            f"{one.layout.sp_size} = {one.layout.ulysses_size} x {one.layout.ring_size}",
            _secondary(one),
            seconds_text(one.time.traffic_s),
            "configured" if not one.settings else "",
        )
        for one in found
    ]
    header = ("step", "device", "dp", "sp = ulysses x ring", "secondary", "traffic", "")
    lines = [f"layouts that fit on {workers} ({network})", *table(header, rows)]
    lines += [misfit] if all(one.settings for one in found) else []
    lines += _fastest(found)
    lines.append("  Predicted, if each row is one document; traffic is the part that does not overlap with compute.")
    return as_text(lines)


def _secondary(one: LayoutChoice) -> str:
    from ray_ulysses.planner.settings import secondary_size

    return "node" if secondary_size(one.config) > 1 else "none"


def _fastest(found: Sequence[LayoutChoice]) -> list[str]:
    fastest, now = found[0], next((one for one in found if not one.settings), None)
    options = fastest.options()
    if not options:
        return ["the configured layout is the fastest"]
    reasons = [] if now is None else [("because", fastest.reason(now))]
    return [f"the fastest: {options}", *facts(reasons)]


def _layout_json(one: LayoutChoice) -> dict[str, Any]:
    return {
        "settings": dict(one.settings),
        "sp_size": one.layout.sp_size,
        "ring_size": one.layout.ring_size,
        "dp_size": one.layout.dp_size,
        "zero_secondary": _secondary(one),
        "device_bytes": one.memory.device_bytes,
        "step_s": one.time.seconds,
        "terms": {term.name: term.seconds for term in one.time.terms},
    }


def _tell_fit(config: Config, base: Path, as_json: bool, *, longest: bool, fit: bool) -> tuple[str, bool]:
    """Return the longest context that fits, the nearest settings that fit, or both, and whether anything fits."""
    from ray_ulysses.planner.problems import fit_hint
    from ray_ulysses.planner.search import choices, longest_contexts, nearest
    from ray_ulysses.run.preflight import planned_memory

    if config.device_gib is None:
        option = "--longest" if longest else "--fit"
        raise UserError(
            f"{option} requires memory.device_gib; set it to the memory of one GPU in GiB, such as "
            "--set memory.device_gib=79, or set a GPU model, such as --set cluster.device=H100"
        )
    planned, shape, chosen = planned_memory(config, base)
    answers: dict[str, dict[str, Any]] = {}
    texts, can_start = [], True
    if longest:
        # Settings that the planner chooses may differ between context lengths.
        lengths = longest_contexts(config, shape, choices(config, shape))
        answers["longest"] = {"configured": lengths.configured, "changed": _json(lengths.changed)}
        texts.append(_render_longest(lengths))
        can_start = lengths.changed is not None
    if fit:
        near = nearest(planned, shape)
        hint = "" if near else fit_hint(planned, shape)
        answers["fit"] = {"nearest": _json(near), "problem": hint or None}
        texts.append(_render_fit(planned, near, hint, chosen))
        can_start = near is not None
    return json.dumps(answers, indent=2) if as_json else "\n\n".join(texts), can_start


def _render_longest(lengths: LongestContexts) -> str:
    """Return the longest contexts that fit with the configured and with changed settings, and the changes."""
    changed, configured = lengths.changed, lengths.configured
    if changed is None:
        return "no context fits, as configured or with any setting; use a smaller model or more workers"
    most = changed.config.data.context_tokens
    lines = [
        f"longest context that fits, {changed.memory.note} (a multiple of {lengths.multiple:,} tokens)",
        *facts(
            [
                ("as configured", f"{configured:,} tokens" if configured else "none fits"),
                ("with changed settings", f"{most:,} tokens" if most > configured else "no longer context"),
            ]
        ),
    ]
    return as_text(lines if most == configured else [*lines, *_changes(changed), *_needs(changed)])


def _render_fit(config: Config, near: Found | None, hint: str, chosen: Sequence[Chosen]) -> str:
    """Return the nearest settings that fit, with the reason for each, as options and as YAML."""
    context = f"{config.data.context_tokens:,} tokens"
    said = [f"  chosen: {one}" for one in chosen]
    if near is None:
        return as_text([f"{context} do not fit", *said, f"  {hint}"])
    if not near.changes:
        return as_text([f"{context} fit as configured; no setting needs to change", *said, *_needs(near)])
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
    from ray_ulysses.planner.search import yaml_value

    if change.before == change.after:
        # For example, activations that are no longer kept need no offloading.
        return f"{yaml_value(change.old)} is incompatible with the settings above"
    after = size(change.after) if change.after else "none"
    return f"{change.term} ({change.place}): {size(change.before)} with {yaml_value(change.old)}, then {after}"


def _needs(found: Found) -> list[str]:
    memory = found.memory
    rows = [
        (name, size(taken) + (f" of {limit:g} GiB" if limit else ""))
        for name, taken, limit in (
            ("device", memory.device_bytes, found.config.device_gib),
            ("host", memory.host_bytes, found.config.memory.host_gib),
        )
    ]
    if found.time is not None:
        rows.append(("step", f"{duration(found.time.seconds)} if each row is one document (predicted)"))
    return facts(rows)


def _yaml(found: Found) -> list[str]:
    from ray_ulysses.config.resume import setting
    from ray_ulysses.planner.search import yaml_value

    sections: dict[str, list[str]] = {}
    for change in found.changes:
        section, _, name = change.path.partition(".")
        value = yaml_value(setting(found.config, change.path))
        sections.setdefault(section, []).append(f"    {name}: {value}")
    return [line for name, lines in sections.items() for line in (f"  {name}:", *lines)]
