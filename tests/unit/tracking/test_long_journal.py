"""Long journals: steps are parsed in bulk, and the ends of a file are sufficient to continue a run."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.tracking import journal_reader
from ray_ulysses.tracking.events import AttemptEnded, AttemptStarted, CheckpointCommitted, Evaluated, Event, StepDone
from ray_ulysses.tracking.history import build_history, finished_step
from ray_ulysses.tracking.journal import claim_journal
from ray_ulysses.tracking.journal_lines import encode_record, with_checksum
from ray_ulysses.tracking.journal_reader import END_BYTES, JournalFileReader, parse_steps, read_entries, read_journal
from ray_ulysses.tracking.run_time import TimeLedger, time_spent
from ray_ulysses.tracking.steps import STEP_ROW, StepGroup, steps_that_count, ungroup_steps
from tests.breadth import examples
from tests.unit.tracking.journals import COMMITTED, STARTED, event, read_events, step

_SIZES = {"world_size": 4, "sp_size": 2, "dp_size": 2, "nodes": ["a"], "resumed_from": None}


def _step(number: int) -> dict[str, Any]:
    return step(
        number,
        loss=float("nan") if number == 7 else 3.0 - number / 7,
        saving_seconds=0.25,
        grad_norm=None if number % 5 == 0 else float("inf") if number % 7 == 0 else 1.25,
        learning_rate=None if number % 3 == 0 else 1e-4,
        mfu=0.4,
    )


def _lines(attempt: int, first: int, last: int) -> list[bytes]:
    return list(_each_line(attempt, first, last))


def _each_line(attempt: int, first: int, last: int) -> Iterator[bytes]:
    """Yield the lines of an attempt that trained some steps, with a checkpoint every thousand."""
    now = 1e6 * attempt
    started = {"event": "attempt_started", **STARTED, **_SIZES, "resumed_step": first - 1, "session": f"s{attempt}"}
    yield encode_record({"time": now, "attempt": attempt, **started})[1]
    for number in range(first, last + 1):
        text = (
            f'{{"time": {now + number}, "attempt": {attempt}, "event": "step", "mfu": 0.41, "loss": {3 - 1 / number}, '
            f'"grad_norm": {1 / number}, "learning_rate": 0.0003, "seconds": 0.98, "tokens_per_s": 8163265.3, '
            f'"peak_memory_gib": 55.125, "world_size": 4.0, "step": {number}, "tokens": {8_000_000 + number}, '
            f'"rows": [{8 * number - 8}, {8 * number}], "digest": "{number * 0x1234567890ABCDEF % 2**64:016x}", '
            '"saving_seconds": 0.001}'
        )
        yield with_checksum(text.encode()) + b"\n"
        if number % 1000 == 0:
            commit = {"event": "checkpoint_committed", **COMMITTED, "step": number, "path": "p", "world_size": 4}
            yield encode_record({"time": now + number, "attempt": attempt, **commit})[1]


def _write(run_dir: Path, attempt: int, lines: Iterable[bytes]) -> None:
    path = run_dir / f"journal/attempt-{attempt:04}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.writelines(lines)


def test_a_row_holds_every_field_of_a_step() -> None:
    # System metrics are used only by trackers, which read steps one by one.
    names = {one.name for one in fields(StepDone)} - {"event", "rows", "system"}
    assert {*STEP_ROW.names} == names | {"first_row", "end_row"}


def test_bulk_parsing_equals_parsing_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, 1, _lines(1, 1, 5000))
    together = read_journal(tmp_path).entries
    assert sum(isinstance(entry, StepGroup) for entry in together) < 20
    monkeypatch.setattr(journal_reader, "_FEW_STEPS", 10_000)
    assert list(map(repr, ungroup_steps(read_entries(tmp_path)))) == list(map(repr, ungroup_steps(together)))


def test_steps_with_odd_numbers_are_read_as_they_were_recorded(tmp_path: Path) -> None:
    """Strings instead of numbers, missing fields, integers instead of floats, and short digests, among normal steps."""
    odd = [
        {"loss": float("nan"), "grad_norm": float("inf")},
        {"z_loss": 0.5, "router_loss": float("nan"), "learning_rate": None},
        {"seconds": 2, "saving_seconds": 0, "loss": 3},
        {"digest": "ff"},
        {"mfu": None, "peak_memory_gib": None},
        {"tokens": 0, "rows": [5, 5]},
    ]
    lines = _lines(1, 1, 3000)
    for place, changes in enumerate(odd):
        lines[200 + 400 * place] = encode_record({"time": 9e5, "attempt": 1, **_step(5000 + place), **changes})[1]
    _write(tmp_path, 1, lines)
    found = read_journal(tmp_path)
    assert found.damaged == ()
    steps = {step.step: step for step in ungroup_steps(found.entries) if isinstance(step, StepDone)}
    for place, changes in enumerate(odd):
        expected = event({"time": 9e5, "attempt": 1, **_step(5000 + place), **changes})
        # In a row, NaN is the only unknown value.
        unknown = {"router_loss": None} if place == 1 else {}
        assert repr(steps[5000 + place]) == repr(replace(expected, **unknown))
    assert len(steps) == 3000


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"tokens": 8000002', b'"tokens": -8'),
        (b'"tokens": 8000002', b'"tokens": 99999999999999999999'),
        (b'"rows": [8, 16]', b'"rows": [16, 8]'),
        (b'"rows": [8, 16]', b'"rows": [8, 12, 16]'),
        (b'"seconds": 0.98', b'"seconds": "0.98"'),
        (b'"digest": "', b'"digest": "x'),
        (b'"learning_rate": 0.0003', b'"learning_rate": 1e400'),
        (b'"attempt": 1', b'"attempt": 2'),
        (b'"step": 2,', b'"step": true,'),
        (b'"step": 2,', b""),
        (b'"step": 2,', b'"step": 2 "step": 3,'),
    ],
)
def test_bulk_parsing_rejects_invalid_values(old: bytes, new: bytes) -> None:
    texts = [line.rstrip(b"\n") for line in _lines(1, 1, 3)[1:]]
    assert parse_steps(texts, 1) is not None
    assert old in texts[1]
    texts[1] = with_checksum(b"{" + texts[1].split(b'", ', 1)[1].replace(old, new))
    assert parse_steps(texts, 1) is None


def test_damage_among_many_steps_has_its_line_number(tmp_path: Path) -> None:
    lines = _lines(1, 1, 5000)
    lines[1234] = lines[1234].replace(b'"tokens": 8', b'"tokens": 9')
    lines[4321] = with_checksum(b"{" + lines[4321].strip().split(b'", ', 1)[1].replace(b"[", b"[-")) + b"\n"
    _write(tmp_path, 1, [*lines[:3000], b"\n", *lines[3000:]])
    found = read_journal(tmp_path)
    assert [record.line for record in found.damaged] == [1235, 4323]
    assert build_history(name="r", journal=found).missing_steps == ((1233, 1233), (4317, 4317))


@pytest.mark.parametrize("cut", [1, 300])
def test_reading_continues_in_a_file_that_grew_in_the_middle_of_a_line(tmp_path: Path, cut: int) -> None:
    content = b"".join(_lines(1, 1, 3000))
    path = tmp_path / "journal/attempt-0001.jsonl"
    path.parent.mkdir()
    for ends_only in (False, True):
        path.write_bytes(content[:-cut])
        reader = JournalFileReader(path, 1)
        first = list(ungroup_steps(reader.read(ends_only=ends_only)))
        path.write_bytes(content + encode_record({"time": 2e6, "attempt": 1, **_step(3001)})[1])
        more = list(ungroup_steps(reader.read(ends_only=ends_only)))
        assert [type(one) for one in more][-1] is StepDone and more[-1].step == 3001
        assert {type(one) for one in (*first, *more)} == {AttemptStarted, StepDone, CheckpointCommitted}
        if not ends_only:
            assert [one for one in (*first, *more) if isinstance(one, StepDone)] == [
                one for one in read_events(tmp_path) if isinstance(one, StepDone)
            ]


def test_the_ends_of_a_long_file_are_its_first_and_last_events(tmp_path: Path) -> None:
    end = {"time": 3e6, "attempt": 1, "event": "attempt_ended", "reason": "stopped"}
    _write(tmp_path, 1, [*_lines(1, 1, 5000), encode_record(end)[1]])
    found = read_journal(tmp_path, ends_only=True)
    assert found.damaged == ()
    events = list(ungroup_steps(found.entries))
    assert [one.step for one in events if isinstance(one, StepDone)] == [1, 5000]
    assert [type(one) for one in events] == [AttemptStarted, StepDone, StepDone, CheckpointCommitted, AttemptEnded]
    whole = build_history(name="r", journal=read_journal(tmp_path))
    ends = build_history(name="r", journal=found)
    assert (ends.status, ends.step, ends.attempts) == (whole.status, whole.step, whole.attempts)


@pytest.mark.parametrize("shift", [0, 30])
def test_a_file_slightly_longer_than_its_ends_is_read_completely(tmp_path: Path, shift: int) -> None:
    def line(step: int) -> bytes:
        evaluated = {"event": "evaluation", "step": step, "loss": 1.0, "tokens": 1, "pad": ""}
        pad = "x" * (1000 - len(encode_record({"time": 1.0, "attempt": 1, **evaluated})[1]))
        return encode_record({"time": 1.0, "attempt": 1, **evaluated, "pad": pad})[1]

    # The first end is slightly longer than `END_BYTES`, because it ends at a line break.
    lines = [line(number + 1) for number in range(2 * END_BYTES // 1000 + 1)]
    assert {*map(len, lines)} == {1000} and 2 * END_BYTES < len(lines) * 1000 < 2 * END_BYTES + 928
    _write(tmp_path, 1, [b"\n" * shift, *lines])
    events = read_entries(tmp_path, ends_only=True)
    assert [one.step for one in events if isinstance(one, Evaluated)] == list(range(1, len(lines) + 1))


@pytest.mark.parametrize(("from_the_end", "steps"), [(1, [1, 1998]), (5, [1, 1999])])
def test_a_damaged_step_at_the_end_of_a_long_file_is_reported(
    tmp_path: Path, from_the_end: int, steps: list[int]
) -> None:
    lines = _lines(1, 1, 1999)
    assert len(b"".join(lines)) > 2 * END_BYTES
    lines[-from_the_end] = lines[-from_the_end].replace(b'"loss": 2', b'"loss": 3')
    _write(tmp_path, 1, lines)
    found = read_journal(tmp_path, ends_only=True)
    assert [one.step for one in ungroup_steps(found.entries) if isinstance(one, StepDone)] == steps
    assert [one.reason for one in found.damaged] == ["the checksum is wrong"]


def measure(run_dir: Path, num_steps: int) -> None:
    """Print the cost of opening a journal for a new attempt, and of reading it completely."""
    cpu = time.process_time()
    assert finished_step(read_entries(run_dir, ends_only=True)) is None
    journal = claim_journal(run_dir)
    opened_s = time.process_time() - cpu
    history = build_history(name="r", journal=read_journal(run_dir))
    assert (history.step, len(history.steps), history.missing_steps) == (num_steps, num_steps, ())
    # Not `ru_maxrss`, which starts at the size of the parent process.
    (peak_kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    journal.path.unlink()
    print(
        json.dumps(
            {"opened_s": opened_s, "read_s": time.process_time() - cpu - opened_s, "peak_mib": int(peak_kib) / 1024}
        )
    )


@pytest.mark.slow
def test_a_long_journal_is_opened_and_read_within_its_budget(tmp_path: Path) -> None:
    num_steps, num_attempts = 1_000_000, 100
    each = num_steps // num_attempts
    for number in range(num_attempts):
        _write(tmp_path, number + 1, _each_line(number + 1, number * each + 1, (number + 1) * each))
    call = f"measure(pathlib.Path({str(tmp_path)!r}), {num_steps})"
    script = f"import pathlib; from tests.unit.tracking.test_long_journal import measure; {call}"
    found = json.loads(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout)
    print(f"{num_steps:,} steps in {num_attempts} attempts, CPU seconds: {found}")
    # Half a second, 10 s and 500 MiB for a million steps on a quiet machine.
    assert found["opened_s"] < 5.0
    assert found["read_s"] < 20.0
    assert found["peak_mib"] < 500


def _random_events(seed: int) -> list[Event]:
    """Return a random journal in which attempts resume anywhere, and some steps are repeated or out of order."""
    drawn, events, now, step = random.Random(seed), [], 100.0, 0
    for attempt in range(1, drawn.randint(2, 6)):
        resumed = drawn.randint(0, step)
        if drawn.random() < 0.9:
            started = {**_SIZES, **STARTED, "event": "attempt_started", "resumed_step": resumed}
            events.append(event({**started, "attempt": attempt, "time": now}))
        step = resumed
        for _ in range(drawn.randint(0, 30)):
            step = max(1, step + drawn.choice((1, 1, 1, 1, 1, 1, 2, 0, -3)))
            now += drawn.uniform(-0.5, 3.0)
            events.append(event({**_step(step), "attempt": attempt, "time": now, "seconds": drawn.uniform(0.0, 2.0)}))
            if drawn.random() < 0.1:
                evaluated = {"event": "evaluation", "step": step, "loss": 1.0, "tokens": 1, "seconds": drawn.random()}
                events.append(event({**evaluated, "attempt": attempt, "time": now}))
    return events


@pytest.mark.parametrize("seed", range(examples(200)))
def test_grouped_steps_count_like_single_steps(seed: int) -> None:
    events = _random_events(seed)
    kept: dict[int, StepDone] = {}
    gone, attempt = [], 0
    for one in events:
        if isinstance(one, AttemptStarted | StepDone) and one.attempt != attempt:
            resumed = one.resumed_step if isinstance(one, AttemptStarted) else one.step - 1
            gone += [kept.pop(step) for step in [*kept] if step > resumed]
            attempt = one.attempt
        if isinstance(one, StepDone):
            gone += [kept.pop(one.step)] if one.step in kept else []
            kept[one.step] = one
    counted = steps_that_count(events)
    assert [(step.step, step.attempt, step.seconds) for step in counted.kept] == [
        (step.step, step.attempt, step.seconds) for _, step in sorted(kept.items())
    ]
    assert sorted(step.seconds for part in (counted.lost, counted.repeated) for step in part) == sorted(
        step.seconds for step in gone
    )
    assert counted.kept.digest == sum(step.digest for step in kept.values()) % 2**64
    assert counted.kept.tokens == sum(step.tokens for step in kept.values())


@pytest.mark.parametrize("seed", range(examples(200)))
def test_grouped_steps_take_the_time_of_single_steps(seed: int) -> None:
    events = _random_events(seed)
    ledger = TimeLedger()
    for one in events:
        ledger.add(one)
    assert time_spent(events).metrics() == pytest.approx(ledger.spent().metrics(), abs=2e-3)
