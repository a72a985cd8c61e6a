"""The index of a journal: it saves the parsing, is never believed where it is wrong, and hides no damage."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.tracking import journal, journal_index, journal_lines, journal_reader
from ray_ulysses.tracking.counted_steps import steps_that_count
from ray_ulysses.tracking.events import AttemptStarted, Event, StepDone
from ray_ulysses.tracking.history import RunHistory, read_history
from ray_ulysses.tracking.journal import AttemptJournal
from ray_ulysses.tracking.journal_index import JournalFileIndex, index_path
from ray_ulysses.tracking.journal_reader import index_journal, read_journal
from ray_ulysses.tracking.step_groups import STEP_ROW, StepGroup, group_steps, ungroup_steps
from ray_ulysses.tracking.time_spent import TimeLedger, time_spent
from tests.breadth import examples
from tests.unit.tracking.journals import event, read_events

_SIZES = {"world_size": 4, "sp_size": 2, "dp_size": 2, "nodes": ["a"], "resumed_from": None}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few lines, so that a short journal has several."""
    monkeypatch.setattr(journal, "BLOCK_BYTES", 4000)
    monkeypatch.setattr(journal_index, "BLOCK_BYTES", 4000)
    monkeypatch.setattr(journal, "MIN_BYTES", 1)
    monkeypatch.setattr(journal_reader, "MIN_BYTES", 1)


class _Parsing:
    """Counts the lines that are parsed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_lines, parse = 0, journal_lines.parse_line

        def counted(*args: Any, **options: Any) -> Event | None:
            self.num_lines += 1
            return parse(*args, **options)

        monkeypatch.setattr(journal_lines, "parse_line", counted)


def _step(number: int) -> dict[str, Any]:
    return {
        "event": "step",
        "step": number,
        "loss": float("nan") if number == 7 else 3.0 - number / 7,
        "tokens": 1000 + number,
        "rows": [number * 6 - 6, number * 6],
        "digest": f"{number * 0x1234567890ABCDEF % 2**64:016x}",
        "seconds": 1.5,
        "saving_seconds": 0.25,
        "grad_norm": None if number % 5 == 0 else float("inf") if number % 7 == 0 else 1.25,
        "learning_rate": None if number % 3 == 0 else 1e-4,
        "mfu": 0.4,
    }


def _run(folder: Path, *, is_killed: bool = False) -> Path:
    """Write the journal of a run whose second attempt goes on from step 30; returns the run's directory."""
    first = AttemptJournal.claim(folder)
    first.append({"event": "attempt_started", **_SIZES, "resumed_step": 0, "session": "x"})
    for number in range(1, 41):
        first.append(_step(number))
        if number % 10 == 0:
            path = f"checkpoints/step-{number:08d}"
            first.append({"event": "checkpoint_committed", "step": number, "path": path, "world_size": 4})
            first.append({"event": "evaluation", "step": number, "loss": 2.5, "tokens": 77, "seconds": 0.5})
    if not is_killed:
        first.close()
    second = AttemptJournal.claim(folder)
    second.append({"event": "attempt_started", **_SIZES, "resumed_step": 30, "session": "x"})
    for number in range(31, 61):
        second.append(_step(number))
    second.append({"event": "attempt_ended", "reason": "finished"})
    if not is_killed:
        second.close()
    return folder


def _journal_file(folder: Path, attempt: int = 1) -> Path:
    return folder / f"journal/attempt-{attempt:04d}.jsonl"


def _delete_indexes(folder: Path) -> None:
    for path in (folder / "journal").glob("*.index"):
        path.unlink()


def _numbers(history: RunHistory) -> RunHistory:
    """Return a history that equals another one of the same numbers: a loss that is not a number equals none."""
    return replace(history, steps=tuple(repr(step) for step in history.steps))


def test_the_index_says_what_the_lines_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(tmp_path)
    parsing = _Parsing(monkeypatch)
    indexed, history = [repr(one) for one in read_events(tmp_path)], read_history(tmp_path, is_held=False)
    assert parsing.num_lines == 0
    _delete_indexes(tmp_path)
    assert [repr(one) for one in read_events(tmp_path)] == indexed
    assert _numbers(read_history(tmp_path, is_held=False)) == _numbers(history)
    assert parsing.num_lines == 2 * len(indexed)


def test_a_row_holds_every_field_of_a_step() -> None:
    names = {one.name for one in fields(StepDone)} - {"event", "rows"}
    assert {*STEP_ROW.names} == names | {"first_row", "end_row", "has"}


def test_an_attempt_that_is_killed_has_left_little_to_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(tmp_path, is_killed=True)
    expected = [repr(one) for one in read_events(tmp_path)]
    parsing = _Parsing(monkeypatch)
    assert [repr(one) for one in read_events(tmp_path)] == expected
    assert 0 < parsing.num_lines < 40
    index_journal(tmp_path)
    parsing.num_lines = 0
    assert [repr(one) for one in read_events(tmp_path)] == expected
    assert parsing.num_lines == 0


def test_the_journal_of_a_version_without_index_is_indexed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(tmp_path)
    indexes = {path.name: path.read_bytes() for path in (tmp_path / "journal").glob("*.index")}
    _delete_indexes(tmp_path)
    for _ in range(2):
        index_journal(tmp_path)
        parsing = _Parsing(monkeypatch)
        read_journal(tmp_path)
        assert parsing.num_lines == 0
        assert {path.name for path in (tmp_path / "journal").glob("*.index")} == set(indexes)


def _flip(content: bytes, bit: int) -> bytes:
    return content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :]


def _flips(content: bytes, count: int, seed: int) -> Iterator[bytes]:
    drawn = random.Random(seed)
    return (_flip(content, drawn.randrange(8 * len(content))) for _ in range(count))


@pytest.mark.parametrize("attempt", [1, 2])
def test_damage_in_an_indexed_journal_file_is_named_as_without_index(tmp_path: Path, attempt: int) -> None:
    _run(tmp_path)
    file = _journal_file(tmp_path, attempt)
    index, content = index_path(file).read_bytes(), file.read_bytes()
    for damaged in _flips(content, 150, seed=attempt):
        file.write_bytes(damaged)
        index_path(file).write_bytes(index)
        found = read_history(tmp_path, is_held=False)
        assert found.damaged_records
        # Nor is it indexed away.
        index_journal(tmp_path)
        assert _numbers(read_history(tmp_path, is_held=False)) == _numbers(found)
        index_path(file).unlink()
        assert _numbers(read_history(tmp_path, is_held=False)) == _numbers(found)


def test_a_damaged_index_is_not_believed_and_is_mended(tmp_path: Path) -> None:
    expected = _numbers(read_history(_run(tmp_path), is_held=False))
    path = index_path(_journal_file(tmp_path))
    index = path.read_bytes()
    for damaged in (
        *_flips(index, 300, seed=3),
        b"",
        index[:-1],
        index[:100],
        index + b"x" * 99,
        index[100:],
        index * 2,
    ):
        path.write_bytes(damaged)
        assert _numbers(read_history(tmp_path, is_held=False)) == expected
    index_journal(tmp_path)
    assert path.read_bytes() == index


def test_an_index_of_another_journal_file_is_not_believed(tmp_path: Path) -> None:
    _run(tmp_path)
    one, other = (index_path(_journal_file(tmp_path, attempt)) for attempt in (1, 2))
    expected = [repr(event) for event in read_events(tmp_path)]
    other.write_bytes(one.read_bytes())
    assert [repr(event) for event in read_events(tmp_path)] == expected


def test_a_journal_file_that_has_lost_its_end_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    _run(tmp_path)
    file = _journal_file(tmp_path)
    content = file.read_bytes()
    for size in range(0, len(content), 997):
        file.write_bytes(content[:size])
        found = [repr(event) for event in read_events(tmp_path)]
        index = index_path(file).read_bytes()
        index_path(file).unlink()
        assert [repr(event) for event in read_events(tmp_path)] == found
        index_path(file).write_bytes(index)


def test_a_disk_without_room_for_an_index_costs_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal_index.os, "write", refuse)
        _run(tmp_path / "without")
    assert all(not path.read_bytes() for path in (tmp_path / "without/journal").glob("*.index"))
    assert len(read_events(tmp_path / "without")) == len(read_events(_run(tmp_path / "with")))


def test_an_index_that_went_up_in_part_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(tmp_path)
    whole = index_path(_journal_file(tmp_path)).read_bytes()
    _delete_indexes(tmp_path)
    index = JournalFileIndex(_journal_file(tmp_path), 1)
    write = journal_index.os.write
    with monkeypatch.context() as patch:
        patch.setattr(journal_index.os, "write", lambda descriptor, content: write(descriptor, content[:50]))
        index.extend(200)
    assert len(index_path(_journal_file(tmp_path)).read_bytes()) == 50
    index.extend(200)
    assert len(index_path(_journal_file(tmp_path)).read_bytes()) >= len(whole) - 4096


def _random_events(seed: int) -> list[Event]:
    """Return a journal in which attempts resume anywhere, and now and then a step comes twice or out of order."""
    drawn, events, now, step = random.Random(seed), [], 100.0, 0
    for attempt in range(1, drawn.randint(2, 6)):
        resumed = drawn.randint(0, step)
        if drawn.random() < 0.9:
            events.append(
                event({**_SIZES, "event": "attempt_started", "attempt": attempt, "time": now, "resumed_step": resumed})
            )
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
def test_steps_in_runs_count_as_one_by_one(seed: int) -> None:
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
    assert [step.step for step in counted.kept] == sorted(kept)
    assert [(step.step, step.attempt, step.seconds) for step in counted.kept] == [
        (step.step, step.attempt, step.seconds) for _, step in sorted(kept.items())
    ]
    assert sorted(step.seconds for part in (counted.lost, counted.repeated) for step in part) == sorted(
        step.seconds for step in gone
    )
    assert counted.kept.digest == sum(step.digest for step in kept.values()) % 2**64
    assert counted.kept.tokens == sum(step.tokens for step in kept.values())


@pytest.mark.parametrize("seed", range(examples(200)))
def test_the_time_of_steps_in_runs_is_that_of_single_steps(seed: int) -> None:
    events = _random_events(seed)
    ledger = TimeLedger()
    for one in events:
        ledger.add(one)
    assert time_spent(events).metrics() == pytest.approx(ledger.spent().metrics(), abs=2e-3)


def test_groups_give_their_events_back() -> None:
    events = _random_events(5)
    groups = list(group_steps(events))
    assert any(isinstance(group, StepGroup) and len(group.rows) > 1 for group in groups)
    assert list(map(repr, ungroup_steps(groups))) == list(map(repr, events))
