"""Damage in a journal is reported or harmless, and never silently changes a number."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.tracking.events import StartFailed
from ray_ulysses.tracking.failures import record_failure
from ray_ulysses.tracking.history import build_history, read_history
from ray_ulysses.tracking.journal import claim_journal
from ray_ulysses.tracking.journal_lines import encode_record, parse_line, with_checksum
from ray_ulysses.tracking.journal_reader import read_head_and_tail, read_journal
from ray_ulysses.tracking.steps import ungroup_steps
from ray_ulysses.validation import ContentError
from tests.unit.tracking.journals import COMMITTED, STARTED, step

_SIZES = {"world_size": 4, "sp_size": 2, "dp_size": 2, "nodes": ["a", "b"]}


def _step(number: int) -> dict[str, Any]:
    return step(number, grad_norm=1.25, peak_memory_gib=1.5, mfu=None)


def _sum(step: int) -> dict[str, Any]:
    steps = [_step(number) for number in range(1, step + 1)]
    digest = sum(int(one["digest"], 16) for one in steps) % 2**64
    return {"digest": f"{digest:016x}", "tokens": sum(one["tokens"] for one in steps), "next_row": step * 6}


def _committed(step: int, **changes: Any) -> dict[str, Any]:
    fields = {
        "event": "checkpoint_committed",
        **COMMITTED,
        "step": step,
        "path": f"checkpoints/step-{step:08d}",
        "world_size": 4,
    }
    return {**fields, **_sum(step), **changes}


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
    first = claim_journal(folder)
    first.append(
        {"event": "attempt_started", **STARTED, **_SIZES, "resumed_step": 0, "resumed_from": None, "session": "x"}
    )
    for number in range(1, 10):
        first.append(_step(number))
        if number in (4, 8):
            first.append(_committed(number))
    first.append({"event": "evaluation", "step": 9, "loss": 2.5, "tokens": 77})
    first.close()
    second = claim_journal(folder)
    started = {**_SIZES, "world_size": 2, "dp_size": 1, "resumed_step": 8, "resumed_from": "checkpoints/step-00000008"}
    second.append({"event": "attempt_started", **STARTED, **started, "session": "x", "last_step": 12})
    for number in range(9, 13):
        second.append(_step(number))
    second.append(_committed(12))
    second.append({"event": "attempt_ended", "reason": "finished"})
    second.append({"event": "run_finished", "step": 12})
    second.close()
    return folder


def _lines(folder: Path, attempt: int = 1) -> list[bytes]:
    return (folder / f"journal/attempt-{attempt:04d}.jsonl").read_bytes().splitlines()


def _rewrite(folder: Path, lines: list[bytes], attempt: int = 1) -> None:
    (folder / f"journal/attempt-{attempt:04d}.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))


@pytest.mark.parametrize("number", [1, 4, 10])
def test_a_damaged_step_is_reported_and_missing(tmp_path: Path, number: int) -> None:
    expected = build_history(name="r", journal=read_journal(_run(tmp_path)))
    attempt = 1 if number < 9 else 2
    lines = _lines(tmp_path, attempt)
    line = next(n for n, line in enumerate(lines) if b'"step"' in line and json.loads(line).get("step") == number)
    place = lines[line].index(b'"digest": "') + len(b'"digest": "')
    lines[line] = lines[line][:place] + bytes([lines[line][place] ^ 0x40]) + lines[line][place + 1 :]
    _rewrite(tmp_path, lines, attempt)
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
    path = tmp_path / "journal/attempt-0001.jsonl"
    path.parent.mkdir()
    started = {"event": "attempt_started", **STARTED, **_SIZES, "resumed_step": 0, "resumed_from": None}
    lost = '{"event": "step", "step'
    events = [started, lost, {**_step(2), "step": 10**12}, {**_committed(8), "step": 10**12}]
    lines = [one if isinstance(one, str) else json.dumps({"time": 1.0, "attempt": 1, **one}) for one in events]
    path.write_bytes(b"".join(with_checksum(line.encode()) + b"\n" for line in lines))
    history = read_history(tmp_path)
    assert (history.step, history.missing_steps) == (10**12, ((1, 10**12 - 1),))
    assert history.to_json()["missing_steps"] == [[1, 10**12 - 1]]


def test_a_record_of_another_attempt_is_damage(tmp_path: Path) -> None:
    lines = _lines(_run(tmp_path))
    _rewrite(tmp_path, [*_lines(tmp_path, 2), lines[1]], attempt=2)
    (record,) = read_journal(tmp_path).damaged
    assert record.reason == "attempt is 1, but the journal file belongs to attempt 2"


def test_an_event_of_a_later_version_is_ignored(tmp_path: Path) -> None:
    journal = claim_journal(tmp_path)
    journal.append({"event": "preemption_notice", "step": 3, "of_a_later_version": {"node": "a"}})
    journal.close()
    later = (tmp_path / "journal/attempt-0001.jsonl").read_bytes().replace(b"preemption_notice", b"node_replaced")
    text = b"{" + later.split(b'", ', 1)[1].strip()
    _rewrite(tmp_path, [*_lines(tmp_path), with_checksum(text)])
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
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal/attempt-0001.jsonl").write_bytes(with_checksum(text.encode()) + b"\n")
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
    lines = _lines(tmp_path)
    _rewrite(tmp_path, [*lines[:5], lines[5][:100] + bytes(16 << 20), *lines[6:]])
    begun = time.process_time()
    found = read_journal(tmp_path)
    assert time.process_time() - begun < 5.0
    assert len(found.damaged) == 1
    assert build_history(name="r", journal=found).steps == expected.steps
