"""Damage in a journal is reported or harmless; long journals are parsed in bulk, or only at their ends."""

from __future__ import annotations

import json
import os
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

from ray_ulysses.errors import UserError
from ray_ulysses.tracking import journal_reader
from ray_ulysses.tracking.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    Evaluated,
    Event,
    RunFailed,
    StartFailed,
    StepDone,
)
from ray_ulysses.tracking.failures import record_failure
from ray_ulysses.tracking.history import build_history, finished_step, read_history
from ray_ulysses.tracking.journal import claim_journal
from ray_ulysses.tracking.journal_lines import encode_record, parse_line, with_checksum
from ray_ulysses.tracking.journal_reader import (
    END_BYTES,
    JournalFileReader,
    parse_steps,
    read_entries,
    read_head_and_tail,
    read_journal,
)
from ray_ulysses.tracking.run_time import TimeLedger, time_spent
from ray_ulysses.tracking.steps import STEP_ROW, StepGroup, steps_that_count, ungroup_steps
from ray_ulysses.validation import ContentError
from tests.breadth import examples
from tests.unit.tracking.journals import commit, event, read_events, started, step


def _step(number: int) -> dict[str, Any]:
    return step(
        number,
        loss=float("nan") if number == 7 else 3.0 - number / 7,
        saving_seconds=0.25,
        grad_norm=None if number % 5 == 0 else float("inf") if number % 7 == 0 else 1.25,
        learning_rate=None if number % 3 == 0 else 1e-4,
        mfu=0.4,
    )


def _write(run_dir: Path, attempt: int, lines: Iterable[bytes]) -> None:
    path = run_dir / f"journal/attempt-{attempt:04}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.writelines(lines)


def test_records_of_other_writers_are_ordered_by_time(tmp_path: Path) -> None:
    run_dir = _run(tmp_path)
    times = {"command": [20.0, 50.0], "controller": [10.0, 40.0]}
    for writer, own in times.items():
        for at in own:
            record_failure(run_dir, StartFailed(time=at, attempt=1, reason=writer), writer=writer)
    entries = read_journal(run_dir).entries
    beside = [number for number, entry in enumerate(entries) if isinstance(entry, StartFailed)]
    assert [entries[number].time for number in beside] == [10.0, 20.0, 40.0, 50.0]
    assert {entry.attempt for entry in entries[: beside[0]]} == {1}
    assert {entry.attempt for entry in entries[beside[-1] + 1 :]} == {2}
    assert read_journal(run_dir).damaged == ()


def _run(folder: Path) -> Path:
    """Write the journal of a run that was killed once and finished by a second attempt."""
    evaluation = {"event": "evaluation", "step": 9, "loss": 2.5, "tokens": 77}
    ends = [{"event": "attempt_ended", "reason": "finished"}, {"event": "run_finished", "step": 12}]
    again = started(8, world_size=2, dp_size=1, session="x", last_step=12)
    for records in (
        [started(session="x"), *map(step, range(1, 5)), commit(4), *map(step, range(5, 10)), evaluation],
        [again, *map(step, range(9, 13)), commit(12), *ends],
    ):
        journal = claim_journal(folder)
        for record in records:
            journal.append(record)
        journal.close()
    return folder


def _stored(folder: Path, attempt: int = 1) -> list[bytes]:
    return (folder / f"journal/attempt-{attempt:04d}.jsonl").read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("number", [1, 4, 10])
def test_a_damaged_step_is_reported_and_missing(tmp_path: Path, number: int) -> None:
    expected = build_history(name="r", journal=read_journal(_run(tmp_path)))
    attempt = 1 if number < 9 else 2
    lines = _stored(tmp_path, attempt)
    line = next(n for n, line in enumerate(lines) if b'"step"' in line and json.loads(line).get("step") == number)
    place = lines[line].index(b'"digest": "') + len(b'"digest": "')
    lines[line] = lines[line][:place] + bytes([lines[line][place] ^ 0x40]) + lines[line][place + 1 :]
    _write(tmp_path, attempt, lines)
    history = build_history(name="r", journal=read_journal(tmp_path))
    assert history.damaged_records == (
        f"journal/attempt-000{attempt}.jsonl, line {line + 1}: the checksum is wrong; ignored",
    )
    others = [step for step in expected.steps if step.step != number]
    assert (list(history.steps), history.missing_steps) == (others, ((number, number),))
    assert (history.step, history.rows_consumed) == (12, 66)
    assert history.tokens == sum(step.tokens for step in others)
    assert history.data_digest == f"{sum(step.digest for step in others) % 2**64:016x}"


def test_a_far_step_makes_one_gap(tmp_path: Path) -> None:
    lost = '{"event": "step", "step'
    events = [started(), lost, {**_step(2), "step": 10**12}, {**commit(8), "step": 10**12}]
    lines = [one if isinstance(one, str) else json.dumps({"time": 1.0, "attempt": 1, **one}) for one in events]
    _write(tmp_path, 1, (with_checksum(line.encode()) + b"\n" for line in lines))
    history = read_history(tmp_path)
    assert (history.step, history.missing_steps) == (10**12, ((1, 10**12 - 1),))
    assert history.to_json()["missing_steps"] == [[1, 10**12 - 1]]


def test_a_record_of_another_attempt_is_damage(tmp_path: Path) -> None:
    lines = _stored(_run(tmp_path))
    _write(tmp_path, 2, [*_stored(tmp_path, 2), lines[1]])
    (record,) = read_journal(tmp_path).damaged
    assert record.reason == "attempt is 1, but the journal file belongs to attempt 2"


def test_an_event_of_a_later_version_is_ignored(tmp_path: Path) -> None:
    journal = claim_journal(tmp_path)
    journal.append({"event": "preemption_notice", "step": 3, "of_a_later_version": {"node": "a"}})
    journal.close()
    later = (tmp_path / "journal/attempt-0001.jsonl").read_bytes().replace(b"preemption_notice", b"node_replaced")
    text = b"{" + later.split(b'", ', 1)[1].strip()
    _write(tmp_path, 1, [*_stored(tmp_path), with_checksum(text) + b"\n"])
    found = read_journal(tmp_path)
    assert found.damaged == ()
    assert [event.event for event in ungroup_steps(found.entries)] == ["preemption_notice"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": ' + "[" * 100_000, "not valid JSON"),
        ('{"event": "step", "time": 1, "attempt": 1, "step": 1e400}', "step.step is inf"),
        (f'{{"event": "step", "step": {"9" * 5000}}}', "not valid JSON"),
        ('{"event": "run_finished", "time": 1, "attempt": 1, "step": -1}', "step is -1"),
        ('{"event": "run_finished", "time": 1, "attempt": 1, "step": true}', "step is True"),
        ('{"event": "attempt_ended", "time": 1, "attempt": 1, "reason": "\\ud800"}', "not valid JSON"),
        ('{"event": "attempt_ended", "time": 1e300, "attempt": 1, "reason": ""}', "time is 1e+300"),
        ('{"event": "attempt_ended", "attempt": 1, "reason": ""}', "attempt_ended.time is missing"),
        ("{\x00", "not valid JSON"),
    ],
    ids=["deep", "overflow", "digits", "negative", "bool", "surrogate", "time", "missing", "nul"],
)
def test_invalid_values_with_a_correct_checksum_are_reported(tmp_path: Path, text: str, reason: str) -> None:
    _write(tmp_path, 1, [with_checksum(text.encode()) + b"\n"])
    (record,) = read_journal(tmp_path).damaged
    assert reason in record.reason
    assert record.reason.isprintable() and len(record.reason) < 500


@pytest.mark.parametrize("kind", ["a folder", "a link to a folder", "a link to nothing"])
def test_a_folder_or_link_in_place_of_a_journal_file_is_reported(tmp_path: Path, kind: str) -> None:
    whole = read_journal(_run(tmp_path))
    path, elsewhere = tmp_path / "journal/attempt-0002.jsonl", tmp_path / "elsewhere"
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to(elsewhere)
        if kind == "a link to a folder":
            elsewhere.mkdir()
    found = read_journal(tmp_path)
    (record,) = found.damaged
    assert ("folder" if kind == "a folder" else "symbolic link") in record.reason
    first = [event for event in ungroup_steps(whole.entries) if event.attempt == 1]
    assert first and list(ungroup_steps(found.entries)) == first
    assert read_head_and_tail(tmp_path, 2) == []


def test_a_pipe_in_place_of_a_journal_file_is_refused(tmp_path: Path) -> None:
    _run(tmp_path)
    os.mkfifo(tmp_path / "journal/attempt-0003.jsonl")
    with pytest.raises(UserError, match=r"attempt-0003\.jsonl: is a pipe"):
        read_journal(tmp_path)


def test_every_flipped_bit_of_a_line_is_damage() -> None:
    line = encode_record({"time": 1.0, "attempt": 1, **_step(1)})[1].removesuffix(b"\n")
    for bit in range(8 * len(line)):
        flipped = bytearray(line)
        flipped[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(ContentError):
            parse_line(bytes(flipped), 1)


def test_an_overwritten_line_is_skipped_quickly_and_changes_no_step(tmp_path: Path) -> None:
    expected = build_history(name="r", journal=read_journal(_run(tmp_path)))
    lines = _stored(tmp_path)
    _write(tmp_path, 1, [*lines[:5], lines[5][:100] + bytes(16 << 20) + b"\n", *lines[6:]])
    begun = time.process_time()
    found = read_journal(tmp_path)
    assert time.process_time() - begun < 5.0
    assert len(found.damaged) == 1
    assert build_history(name="r", journal=found).steps == expected.steps


def _lines(attempt: int, first: int, last: int) -> list[bytes]:
    return list(_each_line(attempt, first, last))


def _each_line(attempt: int, first: int, last: int) -> Iterator[bytes]:
    """Yield the lines of an attempt that trained some steps, with a checkpoint every thousand."""
    now = 1e6 * attempt
    begin = started(first - 1, session=f"s{attempt}")
    yield encode_record({"time": now, "attempt": attempt, **begin})[1]
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
            yield encode_record({"time": now + number, "attempt": attempt, **commit(number)})[1]


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
    read_s = time.process_time() - cpu - opened_s
    print(json.dumps({"opened_s": opened_s, "read_s": read_s, "peak_mib": int(peak_kib) / 1024}))


@pytest.mark.slow
def test_a_long_journal_is_opened_and_read_within_its_budget(tmp_path: Path) -> None:
    num_steps, num_attempts = 1_000_000, 100
    each = num_steps // num_attempts
    for number in range(num_attempts):
        _write(tmp_path, number + 1, _each_line(number + 1, number * each + 1, (number + 1) * each))
    call = f"measure(pathlib.Path({str(tmp_path)!r}), {num_steps})"
    script = f"import pathlib; from tests.unit.tracking.test_journal_reader import measure; {call}"
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
            events.append(event(started(resumed, attempt=attempt, time=now)))
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
    uncounted = [step.seconds for part in (counted.lost, counted.repeated) for step in part]
    assert sorted(uncounted) == sorted(step.seconds for step in gone)
    assert counted.kept.digest == sum(step.digest for step in kept.values()) % 2**64
    assert counted.kept.tokens == sum(step.tokens for step in kept.values())


@pytest.mark.parametrize("seed", range(examples(200)))
def test_grouped_steps_take_the_time_of_single_steps(seed: int) -> None:
    events = _random_events(seed)
    ledger = TimeLedger()
    for one in events:
        ledger.add(one)
    assert time_spent(events).metrics() == pytest.approx(ledger.spent().metrics(), abs=2e-3)


_FAILED: dict[str, Any] = {
    "time": 21.5, "attempt": 1, "session": "s", "kind": "hang", "reason": "rank 1 stands still", "rank": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "failure",
    [
        AttemptEnded(**_FAILED, fault_at=18.0, detected_at=21.0, restarts=True),
        AttemptEnded(**_FAILED, restarts=True),
        StartFailed(**_FAILED, command_started=2.5, failure=1, max_failures=3),
        RunFailed(**_FAILED, way_out="repair the node", lost_steps=2, restarts=False),
    ],
    ids=["timed", "untimed", "start", "run"],
)
def test_a_failure_is_read_as_it_was_recorded(tmp_path: Path, failure: AttemptEnded | StartFailed | RunFailed) -> None:
    record_failure(tmp_path, failure, writer="controller")
    (read,) = read_entries(tmp_path)
    assert read == failure
