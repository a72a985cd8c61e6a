"""Writing the journal, as a file or in segments: attempt numbers are unique; no record is torn, lost or reordered."""

from __future__ import annotations

import errno
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.run_names import JOURNAL_FOLDER, journal_file_name, segment_key
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.location import ObjectLocation
from ray_ulysses.storage.object_store import ObjectStore
from ray_ulysses.storage.place import open_store, place_of
from ray_ulysses.tracking import journal as journal_module
from ray_ulysses.tracking.events import AttemptEnded, StepDone
from ray_ulysses.tracking.journal import SegmentedJournal, claim_journal, open_journal
from ray_ulysses.tracking.journal_files import SegmentedFile, attempt_numbers, journal_files, open_journal_file
from ray_ulysses.tracking.journal_lines import encode_record
from ray_ulysses.tracking.journal_reader import (
    JournalFileReader,
    JournalTail,
    read_head_and_tail,
    read_journal,
    read_side_files,
)
from ray_ulysses.tracking.steps import ungroup_steps
from tests.s3_server import S3Server
from tests.unit.commands.histories import HandClock
from tests.unit.tracking.journals import read_events, step

ENDED = {"event": "attempt_ended", "reason": "stopped"}


@pytest.fixture
def run_dir(s3: S3Server, prefix: str) -> ObjectLocation:
    place = place_of(s3.uri(prefix))
    assert isinstance(place, ObjectLocation)
    return place


def _steps(run_dir: Path | ObjectLocation, num_damaged: int = 0) -> list[int]:
    """Return the steps of a journal, which has no other damage."""
    found = read_journal(run_dir)
    assert len(found.damaged) == num_damaged
    return [event.step for event in ungroup_steps(found.entries) if isinstance(event, StepDone)]


@pytest.mark.parametrize("kind", ["directory", "object store"])
def test_racing_attempts_never_share_a_number(tmp_path: Path, run_dir: ObjectLocation, kind: str) -> None:
    place = tmp_path if kind == "directory" else run_dir
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: claim_journal(place).attempt, range(8)))
    assert sorted(numbers) == list(range(1, 9)) == list(attempt_numbers(place))
    assert claim_journal(place, after=20).attempt == 21


def test_a_non_finite_loss_is_valid_json(tmp_path: Path) -> None:
    journal = claim_journal(tmp_path)
    for loss in (math.nan, math.inf):
        journal.append({**step(1), "loss": loss})
    lines = journal.path.read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["loss"] for line in lines] == ["nan", "inf"]
    assert [repr(event.loss) for event in read_events(tmp_path) if isinstance(event, StepDone)] == ["nan", "inf"]


def test_a_torn_last_line_is_skipped_and_loses_no_record(tmp_path: Path) -> None:
    journal = claim_journal(tmp_path)
    journal.append(step(1))
    whole = journal.path.read_bytes()
    # A line that lacks only its newline is complete.
    for cut in range(1, len(whole) - 1, 7):
        journal.path.write_bytes(whole + whole[:cut])
        assert _steps(tmp_path) == [1]
    open_journal(tmp_path, 1).append(step(2))
    assert _steps(tmp_path, num_damaged=1) == [1, 2]


@pytest.mark.parametrize(("number", "kind"), [(errno.ESTALE, RunError), (errno.EACCES, UserError)])
def test_an_unavailable_storage_ends_the_attempt_but_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    monkeypatch.setattr(os, "open", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(kind, match=rf"^run\.storage: .*{os.strerror(number)}"):
        claim_journal(tmp_path)
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^run\.storage: .*Not a directory"):
        claim_journal(tmp_path / "file" / "run")


def test_an_unreadable_segment_is_not_taken_for_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run was copied from an object store."""
    folder = tmp_path / "journal" / "attempt-0001.jsonl"
    folder.mkdir(parents=True)
    (folder / "00000000.jsonl").touch()
    journal = claim_journal(tmp_path / "other")
    journal.append(ENDED)
    (folder / "00000001.jsonl").write_bytes(journal.path.read_bytes())
    assert [type(event) for event in read_events(tmp_path)] == [AttemptEnded]
    size = LocalStore._size
    monkeypatch.setattr(LocalStore, "_size", lambda self, key: None if "00000001" in key else size(self, key))
    ((_, file),) = journal_files(tmp_path)
    with pytest.raises(OSError, match=r"the journal segment can't be opened: '.*/00000001\.jsonl'"):
        open_journal_file(file)


class _Disk:
    """A disk with limited free space. A write that does not fit is truncated without an error, like on a real disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room, self.syncs = room, True
        self._pwrite, self._fsync = os.pwrite, os.fsync
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(os, "fsync", self.fsync)

    def pwrite(self, descriptor: int, content: bytes, place: int) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self._pwrite(descriptor, content[: self.room], place)
        self.room -= taken
        return taken

    def fsync(self, descriptor: int) -> None:
        if not self.syncs:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._fsync(descriptor)


class _Ticks(HandClock):
    """A clock that advances by a second at each call."""

    def now(self) -> float:
        self.at += 1.0
        return self.at


@pytest.mark.parametrize("room", [0, 1, 91, 200])
def test_records_that_a_full_disk_rejects_are_written_later_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    journal = claim_journal(tmp_path, _Ticks())
    journal.append(step(1))
    disk = _Disk(monkeypatch, room)
    failed = []
    for number in range(2, 30):
        try:
            journal.append(step(number))
        except OSError:
            failed.append(number)
    assert failed and failed == list(range(failed[0], 30))
    # Readers see only complete records, and the writer knows about the others.
    assert _steps(tmp_path) == list(range(1, failed[0]))
    assert journal.num_waiting_bytes > 0
    with pytest.raises(OSError):
        journal.sync()
    disk.room = 1_000_000
    journal.append(step(30))
    assert journal.num_waiting_bytes == 0
    steps = [one for one in read_events(tmp_path) if isinstance(one, StepDone)]
    # No line is torn, repeated or empty, and each record has the time of its event.
    assert [(one.step, one.time) for one in steps] == [(number, float(number)) for number in range(1, 31)]
    assert len(journal.path.read_bytes().split(b"\n")) == 31


def test_after_a_failed_sync_all_unsynced_records_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports a failed write only once, and may have dropped its data."""
    journal = claim_journal(tmp_path)
    journal.append(step(1))
    journal.sync()
    journal.append(step(2))
    journal.append(step(3))
    disk = _Disk(monkeypatch, 10_000)
    disk.syncs = False
    with pytest.raises(OSError, match="Input/output error"):
        journal.sync()
    assert journal.num_waiting_bytes == journal.path.stat().st_size - journal.path.read_bytes().index(b"\n") - 1
    # Like a full file server: the bytes are lost, but the file size is unchanged.
    content = journal.path.read_bytes()
    kept = content.index(b"\n") + 1
    journal.path.write_bytes(content[:kept] + bytes(len(content) - kept))
    disk.syncs = True
    journal.sync()
    assert journal.path.read_bytes() == content
    journal.append(step(4))
    assert _steps(tmp_path) == [1, 2, 3, 4]


def test_close_retries_and_raises_if_records_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, lost = claim_journal(tmp_path), claim_journal(tmp_path)
    disk = _Disk(monkeypatch, 0)
    for journal in (kept, lost):
        with pytest.raises(OSError):
            journal.append(step(journal.attempt))
    with pytest.raises(OSError, match="No space left"):
        lost.close()
    lost.close()
    disk.room = 1000
    kept.close()
    assert _steps(tmp_path) == [kept.attempt]


def test_buffered_records_are_bounded_by_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_ulysses.tracking.journal._MAX_UNSYNCED_BYTES", 500)
    journal = claim_journal(tmp_path)
    for number in range(50):
        journal.append(step(number))
        assert len(journal._tail) <= 500
    assert _steps(tmp_path) == list(range(50))


def test_records_of_several_threads_are_whole(tmp_path: Path) -> None:
    journal = claim_journal(tmp_path)

    def write(first: int) -> None:
        for number in range(first, first + 100):
            journal.append(step(number))
            if number % 10 == 0:
                journal.sync()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(0, 4000, 1000)))
    assert sorted(_steps(tmp_path)) == [1000 * thread + number for thread in range(4) for number in range(100)]


@pytest.fixture
def journal(run_dir: ObjectLocation, monkeypatch: pytest.MonkeyPatch) -> SegmentedJournal:
    """A journal in an object store, of which three segments are merged at a time."""
    monkeypatch.setattr(journal_module, "MERGED_SEGMENTS", 3)
    return claim_journal(run_dir, HandClock())


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
        remote.append(step(number))
        local.append(step(number))
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
    journal.append(ENDED)
    assert _steps(run_dir) == [1, 2, 3] and journal.num_waiting_bytes == 0
    # Early stopping counts evaluations, so a state in peer memory must not be ahead of them.
    journal.append({"event": "evaluation", "step": 3, "loss": 1.0, "tokens": 1})
    assert journal.num_waiting_bytes == 0


def test_another_writer_continues_its_own_file(run_dir: ObjectLocation) -> None:
    claim_journal(run_dir, HandClock()).close()
    readers: dict[str, JournalFileReader] = {}
    for text in ("one", "two"):
        journal = open_journal(run_dir, 1, writer="command")
        journal.append({"event": "hang", "text": text, "stacks": {}})
        journal.close()
        assert [getattr(event, "text", None) for event in read_side_files(run_dir, readers)] == [text]
        journal.close()
        with pytest.raises(OSError, match="already closed"):
            journal.append(step(1))
    assert [getattr(event, "text", None) for event in read_side_files(run_dir, {})] == ["one", "two"]
    assert read_journal(run_dir).damaged == ()


@pytest.mark.parametrize("call", [1, 3, 5])
@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_failed_upload_loses_tears_or_repeats_no_record(
    run_dir: ObjectLocation, journal: SegmentedJournal, monkeypatch: pytest.MonkeyPatch, call: int, lost: str
) -> None:
    """Call number ``call`` of the store fails, before or after it takes effect."""
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
    assert [getattr(one, "text", None) for one in read_events(run_dir)].count("waits") == 1


def test_a_late_upload_of_a_dead_process_replaces_no_segment(
    run_dir: ObjectLocation, journal: SegmentedJournal
) -> None:
    _write(journal, 1)
    successor = open_journal(run_dir, 1)
    _write(journal, 2)
    _write(successor, 3)
    assert _steps(run_dir) == [1, 2, 3]
    assert successor.num_waiting_bytes == 0


def test_a_missing_segment_is_reported(run_dir: ObjectLocation, journal: SegmentedJournal) -> None:
    _write(journal, 1, 2, 3)
    open_store(run_dir).delete(segment_key(journal_file_name(1), 2))
    assert [record.reason for record in read_journal(run_dir).damaged] == ["its segment 2 is missing"]
    assert [one.step for one in read_events(run_dir) if isinstance(one, StepDone)] == [1, 3]


def test_merged_segments_are_read_exactly_once(run_dir: ObjectLocation, journal: SegmentedJournal) -> None:
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


def test_a_deleted_journal_is_detected(run_dir: ObjectLocation, journal: SegmentedJournal) -> None:
    journal._look()
    assert not journal.is_gone
    open_store(run_dir).delete(JOURNAL_FOLDER)
    journal._look()
    assert journal.is_gone


def test_undeletable_segments_are_merged_and_read_once(
    run_dir: ObjectLocation, journal: SegmentedJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectStore, "delete_files", Mock(side_effect=PermissionError(13, "no deletions here")))
    for number in range(1, 9):
        _write(journal, number)
        with suppress(OSError):
            journal._merge()
    assert [name for name in _names(run_dir) if "-" in name] == ["00000001-00000003.jsonl", "00000004-00000006.jsonl"]
    assert _steps(run_dir) == [*range(1, 9)]


def test_a_merge_between_two_listing_pages_is_not_damage(
    run_dir: ObjectLocation, journal: SegmentedJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
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
