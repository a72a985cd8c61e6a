"""Writing the journal: attempt numbers are unique, and no record is torn, lost or reordered."""

from __future__ import annotations

import errno
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.tracking.events import AttemptEnded, StepDone
from ray_ulysses.tracking.journal import claim_journal, open_journal
from ray_ulysses.tracking.journal_files import journal_files, open_journal_file
from tests.unit.tracking.journals import read_events, step


def _ended(reason: str = "stopped") -> dict[str, object]:
    return {"event": "attempt_ended", "reason": reason}


def test_racing_attempts_never_share_a_number(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: claim_journal(tmp_path).attempt, range(16)))
    assert sorted(numbers) == list(range(1, 17))


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
    assert _steps(tmp_path) == [1, 2]


@pytest.mark.parametrize(("number", "kind"), [(errno.ESTALE, RunError), (errno.EACCES, UserError)])
def test_an_unavailable_storage_ends_the_attempt_but_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", fail)
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
    journal.append(_ended())
    (folder / "00000001.jsonl").write_bytes(journal.path.read_bytes())
    assert [type(event) for event in read_events(tmp_path)] == [AttemptEnded]
    size = LocalStore._size
    monkeypatch.setattr(LocalStore, "_size", lambda self, key: None if "00000001" in key else size(self, key))
    ((_, file),) = journal_files(tmp_path)
    with pytest.raises(OSError, match=r"the journal segment can't be opened: '.*/00000001\.jsonl'"):
        open_journal_file(file)


def _steps(run_dir: Path) -> list[int]:
    return [event.step for event in read_events(run_dir) if isinstance(event, StepDone)]


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


class _Ticks:
    """A clock that advances by a second at each call."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        self.time += 1.0
        return self.time

    def monotonic(self) -> float:
        return self.time


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
