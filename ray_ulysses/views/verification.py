"""The text of ``ray-ulysses inspect RUN --verify``: whether law 3 holds, and what breaks it."""

from __future__ import annotations

from collections.abc import Callable

from ray_ulysses.clock import Clock
from ray_ulysses.forensics.reading import Progress
from ray_ulysses.forensics.verdict import Comparison, Finding, Verification
from ray_ulysses.views.words import count, duration, facts, percent

_MOST_OF_A_KIND = 10
_SAY_EVERY_S = 5.0


def render_verification(found: Verification) -> str:
    """Return what was looked at, each finding, and what is no fault but should be known."""
    lines = [f"run {found.name!r} ({found.status}): {_verdict(found)}", *facts(_totals(found))]
    shown: dict[str, int] = {}
    for finding in found.findings:
        shown[finding.kind] = shown.get(finding.kind, 0) + 1
        if shown[finding.kind] <= _MOST_OF_A_KIND:
            lines += ["", *_finding(finding)]
    hidden = {kind: number - _MOST_OF_A_KIND for kind, number in shown.items() if number > _MOST_OF_A_KIND}
    if hidden:
        more = ", ".join(f"{number:,} of {kind}" for kind, number in hidden.items())
        lines += ["", f"  and more, which --json lists: {more}"]
    for note in found.notes:
        lines += ["", f"  note: {note}"]
    return "\n".join(lines)


class ReadingProgress:
    """Says now and then how far the reading of rows has come; says nothing of one that is soon over."""

    def __init__(self, say: Callable[[str], None], clock: Clock) -> None:
        self._say = say
        self._clock = clock
        self._started: float | None = None
        self._said = 0.0

    def __call__(self, progress: Progress) -> None:
        """Take note of a row that was read."""
        now = self._clock.monotonic()
        if self._started is None:
            self._started = self._said = now
        if now - self._said < _SAY_EVERY_S:
            return
        self._said = now
        elapsed = now - self._started
        left = elapsed / progress.rows * (progress.num_rows - progress.rows)
        share = percent(progress.rows / progress.num_rows)
        self._say(
            f"read {progress.rows:,} of {progress.num_rows:,} rows ({share}), "
            f"{count(progress.tokens / elapsed)} tokens/s, about {duration(left)} left"
        )


def _verdict(found: Verification) -> str:
    if found.findings:
        number = len(found.findings)
        return f"DOES NOT HOLD: {number:,} finding{'s' if number > 1 else ''}"
    if not found.steps:
        return "nothing to verify yet"
    if found.reading is None:
        return "every planned row was trained on once; its tokens were not read anew"
    return "every planned row was trained on once, with the tokens that it should have had"


def _totals(found: Verification) -> list[tuple[str, str]]:
    rows = [
        ("plan", " > ".join(found.plan_ids)),
        ("steps", f"{found.steps:,} that count, {found.lost_steps:,} thrown away"),
        ("rows", f"{found.rows:,}"),
        ("tokens", f"{count(found.tokens)} supervised ({found.tokens:,})"),
        ("digest", f"{found.data_digest} in the journal"),
    ]
    if found.reading is None:
        rows.append(("read anew", "no"))
    else:
        reading = found.reading
        rows.append(
            ("read anew", f"{reading.digest:016x} from {reading.rows:,} rows of {reading.steps:,} steps in the corpus")
        )
    rows.append(("checkpoints", f"{found.num_manifests:,} on disk, {found.num_commits:,} noted in the journal"))
    if found.comparison is not None:
        rows.append(("compared", _comparison(found.comparison)))
    return rows


def _comparison(found: Comparison) -> str:
    common = f"{found.common_steps:,} steps"
    if found.answer == "same":
        return f"{found.other} trained the same rows and tokens in all its {common}"
    if found.answer == "same_so_far":
        return (
            f"{found.other} trained the same rows and tokens in the {common} that both have "
            f"({found.own_steps:,} here, {found.other_steps:,} there)"
        )
    if found.answer == "other_plan":
        return f"{found.other} goes by another plan from step {found.first_different_step} on"
    return f"{found.other} differs from step {found.first_different_step} on"


def _finding(finding: Finding) -> list[str]:
    return [f"  {finding.kind}: {finding.where}", f"    {finding.what}", f"    {finding.meaning}"]
