"""Rereads a run's rows from the plan and the corpora, and compares their digests with the journal."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.read.digest import add_digests, row_digest, slice_checksum
from ray_ulysses.data.read.reader import RowReader
from ray_ulysses.errors import UserError
from ray_ulysses.inspect.journal_checks import Finding, rows_text
from ray_ulysses.inspect.trained_steps import step_name
from ray_ulysses.tracking.events import StepDone

_MOST_THREADS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Totals of the trained rows that were read again."""

    steps: int
    """Number of steps whose rows could all be read."""
    rows: int
    tokens: int
    """Number of tokens in the rows, including padding."""
    digest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingProgress:
    """Progress of reading a run's rows again."""

    rows: int
    num_rows: int
    tokens: int
    """Number of tokens in the rows read so far, including padding."""


Watch = Callable[[ReadingProgress], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """Digest and padded length of a row, or the reason why the row can't be read."""

    digest: int = 0
    tokens: int = 0
    problem: str | None = None


def check_rows(plan: Plan, reader: RowReader, steps: Sequence[StepDone], watch: Watch) -> tuple[Reading, list[Finding]]:
    """Read the rows of all given steps and compare each step's digest with the journal.

    Only a few rows are in memory at a time.

    Args:
        plan: The run's plan.
        reader: Reader of the plan's rows.
        steps: Steps that count. Steps after the end of the plan are skipped.
        watch: Progress callback, called after each row.

    Raises:
        StorageAwayError: The storage stayed unavailable for the retry time.
    """
    planned = [step for step in steps if step.step <= plan.num_steps]
    num_rows = sum(len(plan.step_rows(step.step)) for step in planned)
    numbers = (row for step in planned for row in plan.step_rows(step.step))
    rows = _read_rows(reader, numbers)
    findings: list[Finding] = []
    done = num_steps = num_read = tokens = digest = 0
    for step in planned:
        found, problems = 0, []
        for number in plan.step_rows(step.step):
            row = next(rows)
            done += 1
            found = add_digests(found, row.digest)
            tokens += row.tokens
            if row.problem is not None:
                problems.append((number, row.problem))
            watch(ReadingProgress(rows=done, num_rows=num_rows, tokens=tokens))
        if problems:
            findings.append(_unreadable(step, problems))
            continue
        num_steps += 1
        num_read += len(plan.step_rows(step.step))
        digest = add_digests(digest, found)
        if found != step.digest:
            findings.append(_different(plan, step, found))
    return Reading(steps=num_steps, rows=num_read, tokens=tokens, digest=digest), findings


def _read_rows(reader: RowReader, numbers: Iterable[int]) -> Iterator[_Row]:
    """Yield the rows' digests in order. Threads are used because reading and hashing release the GIL."""
    num_threads = min(_MOST_THREADS, os.cpu_count() or 1)
    pending: deque[Future[_Row]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="ray-ulysses-verify") as threads:
        try:
            for number in numbers:
                pending.append(threads.submit(_read_row, reader, number))
                if len(pending) > 2 * num_threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _read_row(reader: RowReader, number: int) -> _Row:
    try:
        row = reader.read("train", number, 0, 1)
    except UserError as error:
        return _Row(problem=str(error))
    return _Row(digest=row_digest(number, slice_checksum(row)), tokens=row.row_tokens)


def _unreadable(step: StepDone, problems: Sequence[tuple[int, str]]) -> Finding:
    row, problem = problems[0]
    more = f", and neither can {len(problems) - 1} other rows of the step" if len(problems) > 1 else ""
    return Finding(
        kind="unreadable_rows",
        step=step.step,
        where=step_name(step),
        what=f"row {row} can't be read{more}: {problem}",
        meaning="the data that the model received in this step can't be verified",
    )


def _different(plan: Plan, step: StepDone, found: int) -> Finding:
    planned = plan.step_rows(step.step)
    return Finding(
        kind="digest",
        step=step.step,
        where=f"{step_name(step)}, {rows_text(planned.start, planned.stop)}",
        what=f"the model received data with digest {step.digest:016x}, but plan and corpus yield {found:016x}",
        meaning=(
            "a token, label or position in these rows was wrong, or the corpus or the journal was modified afterwards"
        ),
    )
