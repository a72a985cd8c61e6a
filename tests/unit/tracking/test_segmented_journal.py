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
from tests.s3_server import FaultyProxy, S3Server


class _Still:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return 1.7e9

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        raise AssertionError


def _step(number: int) -> dict[str, Any]:
    return {
        "event": "step",
        "step": number,
        "loss": 1.0 / number,
        "tokens": 10,
        "rows": [number - 1, number],
        "digest": f"{number:016x}",
        "seconds": 0.5,
    }


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
    """Put each step into a segment of its own."""
    for number in numbers:
        journal.append(_step(number))
        journal.sync()


def test_its_segments_are_in_order_the_file_that_a_directory_would_hold(
    run_dir: ObjectLocation, tmp_path: Path
) -> None:
    remote, local = claim_journal(run_dir, _Still()), claim_journal(tmp_path, _Still())
    for number in range(1, 8):
        for journal in (remote, local):
            journal.append(_step(number))
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


def test_of_many_that_claim_an_attempt_each_gets_a_number_of_its_own(run_dir: ObjectLocation) -> None:
    with ThreadPoolExecutor(6) as pool:
        numbers = list(pool.map(lambda _: claim_journal(run_dir).attempt, range(6)))
    assert sorted(numbers) == [1, 2, 3, 4, 5, 6] == list(attempt_numbers(run_dir))
    assert claim_journal(run_dir, after=10).attempt == 11


def test_a_step_waits_for_a_sync_and_what_recovery_reads_is_put_at_once(run_dir: ObjectLocation) -> None:
    journal = claim_journal(run_dir, _Still())
    journal.append(_step(1))
    assert _steps(run_dir) == [] and journal.num_waiting_bytes > 0
    journal.append({"event": "attempt_ended", "reason": "stopped"})
    assert _steps(run_dir) == [1] and journal.num_waiting_bytes == 0
    _write(journal, 2)
    assert _steps(run_dir) == [1, 2]


def test_what_waits_is_put_when_it_is_due(run_dir: ObjectLocation) -> None:
    clock = _Still()
    journal, tail = claim_journal(run_dir, clock), JournalTail(run_dir)
    assert tail.poll(at_once=True) == []
    journal.append(_step(1))
    journal.tend()
    assert _steps(run_dir) == []
    clock.time += 4.0
    journal.tend()
    assert _steps(run_dir) == [1]
    assert len(tail.poll(at_once=True)) == 1
    clock.time += 4.0
    journal.append(_step(2))
    journal.tend()
    # Asked a moment ago.
    assert tail.poll() == []
    (entry,) = tail.poll(at_once=True)
    assert [event.step for event in ungroup_steps([entry]) if isinstance(event, StepDone)] == [2]
    journal.close()


def test_another_writer_has_a_file_of_its_own_and_continues_it(run_dir: ObjectLocation) -> None:
    claim_journal(run_dir, _Still()).close()
    for text in ("one", "two"):
        journal = open_journal(run_dir, 1, writer="command")
        journal.append({"event": "hang", "text": text, "stacks": {}})
        journal.close()
        journal.close()
        with pytest.raises(OSError, match="already closed"):
            journal.append(_step(1))
    assert [getattr(event, "text", None) for event in read_side_files(run_dir)] == ["one", "two"]
    assert read_journal(run_dir).damaged == ()


@pytest.mark.parametrize("call", range(1, 6))
@pytest.mark.parametrize("lost", ["request", "answer"])
def test_whichever_put_fails_no_record_is_lost_torn_or_repeated(
    run_dir: ObjectLocation, monkeypatch: pytest.MonkeyPatch, call: int, lost: str
) -> None:
    """The store fails at call n, before or after it has done what it was asked for."""
    journal = claim_journal(run_dir, _Still())
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
            journal.append(_step(number))
        try:
            journal.sync()
        except OSError:
            failures += 1
            # Until the next one succeeds, each record says that it waits.
            with pytest.raises(OSError, match="the store failed"):
                journal.append({"event": "warning", "text": "waits"})
    journal.sync()
    assert failures == 1
    assert _steps(run_dir) == [1, 2, 3, 4, 5]
    events = ungroup_steps(read_journal(run_dir).entries)
    assert [getattr(one, "text", None) for one in events].count("waits") == 1


def test_a_put_of_a_dead_process_that_arrives_late_takes_no_place_of_another(run_dir: ObjectLocation) -> None:
    dead = claim_journal(run_dir, _Still())
    _write(dead, 1)
    successor = open_journal(run_dir, 1)
    _write(dead, 2)
    _write(successor, 3)
    assert _steps(run_dir) == [1, 2, 3]
    assert successor.num_waiting_bytes == 0


def test_a_segment_that_is_missing_is_damage_that_is_named(run_dir: ObjectLocation) -> None:
    _write(claim_journal(run_dir, _Still()), 1, 2, 3)
    open_store(run_dir).delete(segment_key(journal_file_name(1), 2))
    found = read_journal(run_dir)
    assert [record.reason for record in found.damaged] == ["its segment 2 is missing"]
    assert [one.step for one in ungroup_steps(found.entries) if isinstance(one, StepDone)] == [1, 3]


def test_many_segments_become_one_and_nothing_is_read_twice_or_missed(
    run_dir: ObjectLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MERGED_SEGMENTS", 3)
    journal = claim_journal(run_dir, _Still())
    _write(journal, 1, 2, 3)
    ((_, before),) = journal_files(run_dir)
    for number in range(4, 8):
        journal._merge()
        _write(journal, number)
    journal._merge()
    assert _names(run_dir) == ["00000000.jsonl", "00000001-00000003.jsonl", "00000004-00000006.jsonl", "00000007.jsonl"]
    assert _steps(run_dir) == [1, 2, 3, 4, 5, 6, 7]
    # A listing from before the merge still leads to every record.
    assert isinstance(before, SegmentedFile) and len(before.segments) == 4
    with before.open() as stream:
        assert stream.read().count(b"\n") >= 3
    # Killed between the two: the long segment is there and the short ones are, too.
    _, line = encode_record({"time": 1.0, "attempt": 1, **_step(99)})
    open_store(run_dir).create(segment_key(journal_file_name(1), 2), [line])
    assert _steps(run_dir) == [1, 2, 3, 4, 5, 6, 7]
    again = open_journal(run_dir, 1)
    again.append(_step(8))
    again.close()
    assert _names(run_dir)[-1] == "00000008.jsonl"


def test_a_journal_that_was_deleted_is_gone(run_dir: ObjectLocation) -> None:
    journal = claim_journal(run_dir, _Still())
    journal._look()
    assert not journal.is_gone
    open_store(run_dir).delete(JOURNAL_FOLDER)
    journal._look()
    assert journal.is_gone


def test_a_store_that_is_away_keeps_records_in_memory(s3: S3Server, proxy: FaultyProxy, prefix: str) -> None:
    place = place_of(s3.uri(prefix, proxy.port))
    assert isinstance(place, ObjectLocation)
    store = open_store(place, retry_s=0.2)
    store.create(segment_key(journal_file_name(1), 0), [b""])
    journal = SegmentedJournal(store, 1)
    proxy.fail("503", lambda method, path: method == "PUT", times=10_000)
    with pytest.raises(OSError, match="failed"):
        _write(journal, 1)
    with suppress(OSError):
        journal.append(_step(2))
    assert journal.num_waiting_bytes > 0
    assert _steps(place) == []
    proxy.heal()
    journal.close()
    assert _steps(place) == [1, 2]


def test_segments_that_can_not_be_deleted_are_merged_once_and_read_once(
    run_dir: ObjectLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: ObjectStore, keys: Any) -> None:
        raise PermissionError(13, "no deletions here")

    monkeypatch.setattr(journal_module, "MERGED_SEGMENTS", 3)
    monkeypatch.setattr(ObjectStore, "delete_files", denied)
    journal = claim_journal(run_dir, _Still())
    for number in range(1, 9):
        _write(journal, number)
        with suppress(OSError):
            journal._merge()
    assert [name for name in _names(run_dir) if "-" in name] == ["00000001-00000003.jsonl", "00000004-00000006.jsonl"]
    assert _steps(run_dir) == [*range(1, 9)]


def test_a_merge_between_two_pages_of_a_list_is_no_damage(
    run_dir: ObjectLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MERGED_SEGMENTS", 3)
    journal = claim_journal(run_dir, _Still())
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
    journal = claim_journal(run_dir, _Still())
    _write(journal, *range(1, 2101))
    assert _steps(run_dir) == [*range(1, 2101)]
    journal._merge()
    assert len(_names(run_dir)) == 2 and _steps(run_dir) == [*range(1, 2101)]
