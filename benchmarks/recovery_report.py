"""What a run of ``bench_recovery.py`` says, from its record: pure text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.stored_result import NOT_MEASURED, origin, spread, table

GOAL_S, GOAL_RATIO, GOAL_STEPS = 5.0, 15.0, 1
_PARTS = ("detected", "formed", "loaded", "first step")
_NAMES = {
    "ours": "ours",
    "before": "ours before, by restarts of Ray Train's workers",
    "ray": "Ray Train's defaults",
}
_FAULTS = {"node": "A node is killed without notice", "process": "A training process is killed (SIGKILL)"}

RULES = """\
How to read it: seconds from the kill, each as the median with minimum and maximum. **detected**: the failure is
recorded (on Ray's side by rank 0, whose collective breaks; Ray itself records nothing there). **formed**: the ranks
of the next attempt have joined one another and claimed it. **loaded**: their state is whole. **first step**: that
step has ended, its own seconds included. **lost** are steps that had ended and were trained again. All sides run the
same training loop, model, rows and checkpoints (every 20 steps to storage; the kill comes between two of them) on the
same three raylets of one machine; ours keeps its state in peer memory as well. Ray Train's side is its elastic
`ScalingConfig(num_workers=(2, 4))` and `FailureConfig`, everything else as it comes."""


def markdown(record: Mapping[str, Any]) -> str:
    """Return the record as a page."""
    runs = record["runs"]
    parts = ["# From a fault to the next step", origin(record), RULES]
    for fault, title in _FAULTS.items():
        parts += [f"## {title}", _table(runs, fault), _verdict(runs, fault)]
    return "\n\n".join([*parts, "## Raw timelines", _raw(runs)])


def _table(runs: Sequence[Mapping[str, Any]], fault: str) -> str:
    rows = []
    for side, name in _NAMES.items():
        found = [run for run in runs if (run["side"], run["fault"]) == (side, fault)]
        if not found:
            rows.append((name, *[NOT_MEASURED] * (len(_PARTS) + 2)))
            continue
        times = []
        for part in _PARTS:
            values = [run["times"][part] for run in found if run["times"][part] is not None]
            times.append(f"{spread(values, '{:.1f}')} s" if values else "not recorded")
        workers = ", ".join(sorted({str(run["workers"]) for run in found}))
        rows.append((name, *times, spread([run["lost_steps"] for run in found], "{:.0f}"), workers))
    return table(("", *_PARTS, "steps lost", "workers after it"), rows)


def _verdict(runs: Sequence[Mapping[str, Any]], fault: str) -> str:
    first = {
        side: median(run["times"]["first step"] for run in runs if (run["side"], run["fault"]) == (side, fault))
        for side in ("ours", "ray")
        if any((run["side"], run["fault"]) == (side, fault) for run in runs)
    }
    if len(first) < 2:
        return f"The ratio to Ray Train's defaults: {NOT_MEASURED}."
    ratio = first["ray"] / first["ours"]
    lost = max(run["lost_steps"] for run in runs if (run["side"], run["fault"]) == ("ours", fault))
    text = f"Ray Train's defaults take {ratio:.1f} times as long as ours."
    if fault == "node":
        reached = first["ours"] <= GOAL_S and ratio >= GOAL_RATIO and lost <= GOAL_STEPS
        goal = f"at most {GOAL_S:g} s, {GOAL_RATIO:g} times faster, at most {GOAL_STEPS} step lost"
        text += f" The goal ({goal}): {'met' if reached else '**not met**'}."
    return text


def _raw(runs: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            run["side"],
            run["fault"],
            *("" if run["times"][part] is None else f"{run['times'][part]:.2f}" for part in _PARTS),
            f"{run['last_step']} -> {run['resumed_step']}",
        )
        for run in runs
    ]
    return table(("side", "fault", *_PARTS, "last step -> resumed step"), rows)
