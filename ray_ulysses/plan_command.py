"""Answers what ``plan`` is asked, and whether the run can start; imports only what the answer needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ray_ulysses.errors import UserError

if TYPE_CHECKING:
    from ray_ulysses.config import Config


def answer(
    config: Config, base: Path, *, branch: bool, price: float | None, longest: bool, fit: bool, as_json: bool
) -> tuple[str, bool]:
    """Return the plan, or what was asked about what fits instead of it, and whether the run can start."""
    if longest or fit:
        return _tell_fit(config, base, as_json, longest=longest, fit=fit)
    from ray_ulysses.report.plan import render_plan
    from ray_ulysses.run.preflight import report_run

    report = report_run(config, base, branch=branch)
    return json.dumps(report.to_json(), indent=2) if as_json else render_plan(report, price), not report.problems


def _tell_fit(config: Config, base: Path, as_json: bool, *, longest: bool, fit: bool) -> tuple[str, bool]:
    """Return the longest context that fits, the nearest settings that fit, or both.

    Raises:
        UserError: No limit is given.
    """
    from ray_ulysses.planner.problems import fit_hint
    from ray_ulysses.planner.search import choices, longest_contexts, nearest
    from ray_ulysses.run.preflight import planned_memory
    from ray_ulysses.views.fit import fit_json, longest_json, render_fit, render_longest

    if config.memory.device_gib is None:
        option = "--longest" if longest else "--fit"
        raise UserError(
            f"memory.device_gib is not given, and {option} compares with it: give the memory of one GPU in GiB, as in "
            "--set memory.device_gib=79"
        )
    planned, shape, chosen = planned_memory(config, base)
    texts, answers, can_start = [], {}, True
    if longest:
        # What is left to the planner may differ between lengths.
        lengths = longest_contexts(config, shape, choices(config, shape))
        answers["longest"] = longest_json(lengths)
        texts.append(render_longest(lengths))
        can_start = lengths.changed is not None
    if fit:
        near = nearest(planned, shape)
        hint = "" if near else fit_hint(planned, shape)
        answers["fit"] = fit_json(near, hint)
        texts.append(render_fit(planned, near, hint, chosen))
        can_start = near is not None
    return json.dumps(answers, indent=2) if as_json else "\n\n".join(texts), can_start
