"""The journal of a run in an object store: immutable segments, read as one stream."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.run_names import JOURNAL_FOLDER, journal_file_name, segment_key
from ray_ulysses.storage.location import ObjectLocation
from ray_ulysses.storage.object_store import ObjectStore
from ray_ulysses.storage.place import open_store, place_of
from ray_ulysses.tracking import journal as journal_module
from ray_ulysses.tracking.events import StepDone
from ray_ulysses.tracking.journal import SegmentedJournal, claim_journal, open_journal
from ray_ulysses.tracking.journal_files import SegmentedFile, attempt_numbers, journal_files
from ray_ulysses.tracking.journal_lines import encode_record
from ray_ulysses.tracking.journal_reader import JournalTail, read_head_and_tail, read_journal, read_side_files
from ray_ulysses.tracking.steps import ungroup_steps
from tests.s3_server import S3Server
from tests.unit.commands.histories import HandClock
from tests.unit.tracking.journals import step


@pytest.fixture
def run_dir(s3: S3Server, prefix: str) -> ObjectLocation:
    place = place_of(s3.uri(prefix))
    assert isinstance(place, ObjectLocation)
    return place


def _steps(run_dir: ObjectLocation) -> list[int]:
    """Return the steps of a journal that has no damage."""
    found = read_journal(run_dir)
    assert found.damaged == ()
    return [event.step for event in ungroup_steps(found.entries) if isinstance(event, StepDone)]


def _names(run_dir: ObjectLocation) -> list[str]:
    folder = f"{JOURNAL_FOLDER}/{journal_file_name(1)}/"
    return [key.removeprefix(folder) for key in open_store(run_dir).list(JOURNAL_FOLDER)]


def _write(journal: SegmentedJournal, *numbers: int) -> None:
    """Upload each step as a separate segment."""
    for number in numbers:
        journal.append(step(number))
        journal.sync()


def test_the_joined_segments_equal_the_file_in_a_directory(run_dir: ObjectLocation, tmp_path: Path) -> None:
    remote, local = claim_journal(run_dir, HandClock()), claim_journal(tmp_path, HandClock())
    for number in range(1, 8):
        for journal in (remote, local):
            journal.append(step(number))
        if number % 3 == 0:
            remote.sync()
    remote.close()
    local.close()
    assert _names(run_dir) == [f"{number:08d}.jsonl" for number in range(4)]
    ((attempt, file),) = journal_files(run_dir)
    assert attempt == 1 and isinstance(file, SegmentedFile)
    with file.open() as stream:
        assert stream.read() == local.path.read_bytes()
    assert _steps(run_dir) == [*range(1, 8)]
    assert read_head_and_tail(run_dir, 1) == read_head_and_tail(tmp_path, 1)


def test_concurrent_claims_get_distinct_numbers(run_dir: ObjectLocation) -> None:
    with ThreadPoolExecutor(6) as pool:
        numbers = list(pool.map(lambda _: claim_journal(run_dir).attempt, range(6)))
    assert sorted(numbers) == [1, 2, 3, 4, 5, 6] == list(attempt_numbers(run_dir))
    assert claim_journal(run_dir, after=10).attempt == 11


def test_steps_are_uploaded_when_it_is_due_and_durable_records_at_once(run_dir: ObjectLocation) -> None:
    clock = HandClock()
    journal, tail = claim_journal(run_dir, clock), JournalTail(run_dir)
    assert tail.poll(at_once=True) == []
    journal.append(step(1))
    journal.tend()
    assert _steps(run_dir) == []
    clock.at += 4.0
    journal.tend()
    assert _steps(run_dir) == [1]
    assert len(tail.poll(at_once=True)) == 1
    clock.at += 4.0
    journal.append(step(2))
    journal.tend()
    # The store was listed a moment ago.
    assert tail.poll() == []
    (entry,) = tail.poll(at_once=True)
    assert [event.step for event in ungroup_steps([entry]) if isinstance(event, StepDone)] == [2]
    journal.append(step(3))
    assert _steps(run_dir) == [1, 2] and journal.num_waiting_bytes > 0
    journal.append({"event": "attempt_ended", "reason": "stopped"})
    assert _steps(run_dir) == [1, 2, 3] and journal.num_waiting_bytes == 0


def test_another_writer_continues_its_own_file(run_dir: ObjectLocation) -> None:
    claim_journal(run_dir, HandClock()).close()
    for text in ("one", "two"):
        journal = open_journal(run_dir, 1, writer="command")
        journal.append({"event": "hang", "text": text, "stacks": {}})
        journal.close()
        journal.close()
        with pytest.raises(OSError, match="already closed"):
            journal.append(step(1))
    assert [getattr(event, "text", None) for event in read_side_files(run_dir)] == ["one", "two"]
    assert read_journal(run_dir).damaged == ()


@pytest.mark.parametrize("call", range(1, 6))
@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_failed_upload_loses_tears_or_repeats_no_record(
    run_dir: ObjectLocation, monkeypatch: pytest.MonkeyPatch, call: int, lost: str
) -> None:
    """Call number ``call`` of the store fails, before or after it takes effect."""
    journal = claim_journal(run_dir, HandClock())
    create, calls, failures = ObjectStore.create, 0, 0

    def failing(self: ObjectStore, key: str, chunks: Any) -> int:
        nonlocal calls
        calls += 1
        if lost == "answer" and calls == call:
            create(self, key, chunks)
        if calls == call:
            raise OSError(5, "the store failed")
        return create(self, key, chunks)

    monkeypatch.setattr(ObjectStore, "create", failing)
    for number in range(1, 6):
        with nullcontext() if failures == 0 else suppress(OSError):
            journal.append(step(number))
        try:
            journal.sync()
        except OSError:
            failures += 1
            # Until the next upload succeeds, each append reports the failure.
            with pytest.raises(OSError, match="the store failed"):
                journal.append({"event": "warning", "text": "waits"})
    journal.sync()
    assert failures == 1
    assert _steps(run_dir) == [1, 2, 3, 4, 5]
    events = ungroup_steps(read_journal(run_dir).entries)
    assert [getattr(one, "text", None) for one in events].count("waits") == 1


def test_a_late_upload_of_a_dead_process_replaces_no_segment(run_dir: ObjectLocation) -> None:
    dead = claim_journal(run_dir, HandClock())
    _write(dead, 1)
    successor = open_journal(run_dir, 1)
    _write(dead, 2)
    _write(successor, 3)
    assert _steps(run_dir) == [1, 2, 3]
    assert successor.num_waiting_bytes == 0


def test_a_missing_segment_is_reported(run_dir: ObjectLocation) -> None:
    _write(claim_journal(run_dir, HandClock()), 1, 2, 3)
    open_store(run_dir).delete(segment_key(journal_file_name(1), 2))
    found = read_journal(run_dir)
    assert [record.reason for record in found.damaged] == ["its segment 2 is missing"]
    assert [one.step for one in ungroup_steps(found.entries) if isinstance(one, StepDone)] == [1, 3]


def test_merged_segments_are_read_exactly_once(run_dir: ObjectLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MERGED_SEGMENTS", 3)
    journal = claim_journal(run_dir, HandClock())
    _write(journal, 1, 2, 3)
    ((_, before),) = journal_files(run_dir)
    for number in range(4, 8):
        journal._merge()
        _write(journal, number)
    journal._merge()
    assert _names(run_dir) == ["00000000.jsonl", "00000001-00000003.jsonl", "00000004-00000006.jsonl", "00000007.jsonl"]
    assert _steps(run_dir) == [1, 2, 3, 4, 5, 6, 7]
    # A listing from before the merge still yields all records.
    assert isinstance(before, SegmentedFile) and len(before.segments) == 4
    with before.open() as stream:
        assert stream.read().count(b"\n") >= 3
    # As after a kill between merge and deletion: a merged segment and one of its parts exist.
    _, line = encode_record({"time": 1.0, "attempt": 1, **step(99)})
    open_store(run_dir).create(segment_key(journal_file_name(1), 2), [line])
    assert _steps(run_dir) == [1, 2, 3, 4, 5, 6, 7]
    again = open_journal(run_dir, 1)
    again.append(step(8))
    again.close()
    assert _names(run_dir)[-1] == "00000008.jsonl"


def test_a_deleted_journal_is_detected(run_dir: ObjectLocation) -> None:
    journal = claim_journal(run_dir, HandClock())
    journal._look()
    assert not journal.is_gone
    open_store(run_dir).delete(JOURNAL_FOLDER)
    journal._look()
    assert journal.is_gone


def test_undeletable_segments_are_merged_and_read_once(
    run_dir: ObjectLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: ObjectStore, keys: Any) -> None:
        raise PermissionError(13, "no deletions here")

    monkeypatch.setattr(journal_module, "MERGED_SEGMENTS", 3)
    monkeypatch.setattr(ObjectStore, "delete_files", denied)
    journal = claim_journal(run_dir, HandClock())
    for number in range(1, 9):
        _write(journal, number)
        with suppress(OSError):
            journal._merge()
    assert [name for name in _names(run_dir) if "-" in name] == ["00000001-00000003.jsonl", "00000004-00000006.jsonl"]
    assert _steps(run_dir) == [*range(1, 9)]


def test_a_merge_between_two_listing_pages_is_not_damage(
    run_dir: ObjectLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MERGED_SEGMENTS", 3)
    journal = claim_journal(run_dir, HandClock())
    _write(journal, 1, 2, 3, 4)
    sizes, merged = ObjectStore.sizes, [False]

    def paged(self: ObjectStore, folder: str) -> dict[str, int | None]:
        found = sizes(self, folder)
        if not merged[0]:
            # The first page ended before the long segment's name, and the second began after the short ones'.
            merged[0] = True
            journal._merge()
            return {key: size for key, size in found.items() if not key.endswith(("1.jsonl", "2.jsonl", "3.jsonl"))}
        return found

    monkeypatch.setattr(ObjectStore, "sizes", paged)
    assert _steps(run_dir) == [1, 2, 3, 4] and merged[0]


@pytest.mark.slow
def test_a_journal_of_more_segments_than_a_page_of_a_list_is_read_whole(run_dir: ObjectLocation) -> None:
    journal = claim_journal(run_dir, HandClock())
    _write(journal, *range(1, 2101))
    assert _steps(run_dir) == [*range(1, 2101)]
    journal._merge()
    assert len(_names(run_dir)) == 2 and _steps(run_dir) == [*range(1, 2101)]
