"""Checks the runs of a rehearsal: rows, losses, recoveries and goodput (ETTR)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ray_ulysses.inspect.verification import Verification, verify_run
from ray_ulysses.rehearsal.recoveries import InjectedFault, LossComparison, Recovery, RehearsalReport, recoveries
from ray_ulysses.rehearsal.schedule import Fault
from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.events import Event, StepDone
from ray_ulysses.tracking.history import read_history
from ray_ulysses.tracking.journal_reader import read_entries
from ray_ulysses.tracking.steps import ungroup_steps

TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2}
"""Largest relative loss difference that rounding causes at a different number of workers, by dtype."""
_SAMPLES = 8


def report_rehearsal(
    run_dir: Place,
    *,
    planned: Sequence[Fault],
    injected: Sequence[InjectedFault],
    unbroken: Place | None,
    tolerance: float,
    most: int | None = None,
    min_ettr: float | None = None,
    setting: Sequence[str] = (),
    problems: Iterable[str] = (),
) -> RehearsalReport:
    """Return the report of a rehearsal, based on the journals of its runs and a complete verification of their rows.

    ``run_dir`` is that of the run with faults, and ``unbroken`` that of a run without faults, or None if there is none.
    ``min_ettr`` is the smallest allowed fraction of time in steps that count, or None to skip this check. ``problems``
    were found earlier, and are included in the report. For ``most``, see `recoveries`.
    """
    history, events = read_history(run_dir), list(ungroup_steps(read_entries(run_dir)))
    found = recoveries(events, injected, most=most)
    counted = {step.step: step.loss for step in history.steps}
    others = {} if unbroken is None else {step.step: step.loss for step in read_history(unbroken).steps}
    retrained = compare_losses(_pairs_of_retrained(events))
    pairs = ((step, counted[step], others[step]) for step in sorted(counted.keys() & others))
    lost, repeated = count_rows([step.rows for step in history.steps])
    report = RehearsalReport(
        name=history.name,
        run_dir=str(run_dir),
        setting=tuple(setting),
        steps=history.step,
        seconds=history.time_spent.total_s,
        ettr=history.goodput,
        rows=history.rows_consumed,
        rows_lost=lost,
        rows_repeated=repeated,
        data_digest=history.data_digest,
        recoveries=found,
        retrained=retrained,
        unbroken=None if unbroken is None else compare_losses(pairs),
        samples=_samples(counted, others, found, events),
        tolerance=tolerance,
        problems=(),
    )
    verified = verify_run(run_dir, other=unbroken, trust_run=True)
    return replace(report, problems=(*problems, *_problems(report, planned, verified, min_ettr)))


def relative_difference(ours: float, theirs: float) -> float:
    """Return the absolute difference of two losses, relative to the second loss."""
    return abs(ours / theirs - 1.0) if theirs else abs(ours)


def compare_losses(pairs: Iterable[tuple[int, float, float]]) -> LossComparison:
    """Return the largest relative difference among tuples of (step, loss, loss to compare with)."""
    differences = [(relative_difference(ours, theirs), step) for step, ours, theirs in pairs]
    if not differences:
        return LossComparison()
    # NaN is larger than any other difference.
    largest, step = max(differences, key=lambda one: (math.isnan(one[0]), one[0]))
    return LossComparison(steps=len(differences), largest=largest, at_step=step)


def count_rows(ranges: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the number of rows missing from the ranges, and the number of repeated rows, up to the last row."""
    reached = lost = repeated = 0
    for first, stop in sorted(ranges):
        lost += max(0, first - reached)
        repeated += max(0, min(stop, reached) - first)
        reached = max(reached, stop)
    return lost, repeated


def _pairs_of_retrained(events: Iterable[Event]) -> Iterator[tuple[int, float, float]]:
    """Yield (step, new loss, previous loss) for each step that was trained again."""
    losses: dict[int, float] = {}
    for event in events:
        if isinstance(event, StepDone):
            if event.step in losses:
                yield event.step, event.loss, losses[event.step]
            losses[event.step] = event.loss


def _samples(
    ours: Mapping[int, float], others: Mapping[int, float], found: Sequence[Recovery], events: Sequence[Event]
) -> tuple[tuple[int, float, float], ...]:
    """Return the losses of the first step after each recovery, and of a few evenly spaced steps."""
    both = sorted(ours.keys() & others.keys())
    if not both:
        return ()
    recovered = {one.attempt for one in found}
    first = {event.attempt: event.step for event in reversed(events) if isinstance(event, StepDone)}
    steps = {step for attempt, step in first.items() if attempt in recovered}
    steps |= {both[len(both) * part // _SAMPLES] for part in range(_SAMPLES)} | {both[-1]}
    return tuple((step, ours[step], others[step]) for step in sorted(steps.intersection(both)))


def _problems(
    report: RehearsalReport, planned: Sequence[Fault], verified: Verification, min_ettr: float | None
) -> Iterator[str]:
    if len(report.recoveries) < len(planned):
        yield f"only {len(report.recoveries)} of {len(planned)} faults happened before the run ended"
    for one in report.recoveries:
        if not one.is_over:
            yield f"the run did not recover from {one.injected.fault} ({one.injected.what})"
    if report.rows_lost or report.rows_repeated:
        yield f"{report.rows_lost} rows were lost, and {report.rows_repeated} rows were repeated"
    yield from map(str, verified.findings)
    if not verified.steps:
        yield "no step was trained"
    for name, compared in (("its first training", report.retrained), ("the unbroken run", report.unbroken)):
        if compared is not None and not compared.largest <= report.tolerance:
            yield (
                f"the loss of step {compared.at_step} differs from {name} by {compared.largest:.1e}; rounding explains "
                f"at most {report.tolerance:.0e}"
            )
    if report.unbroken is not None and not report.unbroken.steps:
        yield "no step could be compared with the unbroken run"
    if min_ettr is not None and (report.ettr or 0.0) < min_ettr:
        share = f"{100 * (report.ettr or 0.0):.1f}%"
        yield f"{share} of the time was spent in steps that count; at least {100 * min_ettr:g}% is required"
