"""The journal: one number an attempt, whole records only, torn lines that swallow nothing."""

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
from ray_ulysses.tracking.journal_files import attempt_numbers, journal_files, open_journal_file
from tests.unit.tracking.journals import read_events


class _StillClock:
    def now(self) -> float:
        return 1000.0

    def monotonic(self) -> float:
        return 0.0


def _ended(reason: str = "stopped") -> dict[str, object]:
    return {"event": "attempt_ended", "reason": reason}


def test_racing_attempts_never_share_a_number(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: claim_journal(tmp_path).attempt, range(16)))
    assert sorted(numbers) == list(range(1, 17))


def test_a_loss_that_is_not_finite_is_still_json(tmp_path: Path) -> None:
    journal = claim_journal(tmp_path)
    for loss in (math.nan, math.inf):
        journal.append({**_step(1), "loss": loss})
    lines = journal.path.read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["loss"] for line in lines] == ["nan", "inf"]
    assert [repr(event.loss) for event in read_events(tmp_path) if isinstance(event, StepDone)] == ["nan", "inf"]


def test_a_torn_last_line_is_left_out_and_swallows_nothing(tmp_path: Path) -> None:
    journal = claim_journal(tmp_path)
    journal.append(_step(1))
    whole = journal.path.read_bytes()
    # A line that lacks only its line feed is whole.
    for cut in range(1, len(whole) - 1, 7):
        journal.path.write_bytes(whole + whole[:cut])
        assert _steps(tmp_path) == [1]
    open_journal(tmp_path, 1).append(_step(2))
    assert _steps(tmp_path) == [1, 2]


def test_files_of_two_writers_are_one_attempt(tmp_path: Path) -> None:
    journal = claim_journal(tmp_path)
    controller = open_journal(tmp_path, 1, writer="controller")
    controller.append(_ended("worker died"))
    journal.append({"event": "preemption_notice"})
    assert [event.event for event in read_events(tmp_path)] == ["preemption_notice", "attempt_ended"]
    assert controller.path.name == "attempt-0001.controller.jsonl"
    assert claim_journal(tmp_path).attempt == 2


def test_an_event_without_its_fields_is_our_mistake(tmp_path: Path) -> None:
    journal = claim_journal(tmp_path)
    for event in ("attempt_ended", "lunch"):
        with pytest.raises(AssertionError, match=event):
            journal.append({"event": event})


def test_a_storage_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^run\.storage: .*Not a directory"):
        claim_journal(tmp_path / "file" / "run")


@pytest.mark.parametrize(("number", "kind"), [(errno.ESTALE, RunError), (errno.EACCES, UserError)])
def test_a_storage_that_is_away_ends_the_attempt_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(kind, match=rf"^run\.storage: .*{os.strerror(number)}"):
        claim_journal(tmp_path)


def test_a_segment_that_can_not_be_opened_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that was copied from an object store."""
    folder = tmp_path / "journal" / "attempt-0001.jsonl"
    folder.mkdir(parents=True)
    (folder / "00000000.jsonl").touch()
    journal = claim_journal(tmp_path / "other", _StillClock())
    journal.append(_ended())
    (folder / "00000001.jsonl").write_bytes(journal.path.read_bytes())
    assert [type(event) for event in read_events(tmp_path)] == [AttemptEnded]
    size = LocalStore._size
    monkeypatch.setattr(LocalStore, "_size", lambda self, key: None if "00000001" in key else size(self, key))
    ((_, file),) = journal_files(tmp_path)
    with pytest.raises(OSError, match=r"the journal segment can't be opened: '.*/00000001\.jsonl'"):
        open_journal_file(file)


def test_a_run_without_a_journal_has_no_records(tmp_path: Path) -> None:
    assert read_events(tmp_path) == ()
    assert attempt_numbers(tmp_path) == ()


def _step(step: int) -> dict[str, object]:
    return {"event": "step", "step": step, "loss": 1.0, "tokens": 2, "rows": [0, 1], "digest": "0", "seconds": 1.0}


def _steps(run_dir: Path) -> list[int]:
    return [event.step for event in read_events(run_dir) if isinstance(event, StepDone)]


class _Disk:
    """A disk with so much room, in front of the real one; a write that does not fit is cut short without an error."""

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
    """A clock that is one second on at each look."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        self.time += 1.0
        return self.time

    def monotonic(self) -> float:
        return self.time


@pytest.mark.parametrize("room", [0, 1, 91, 200])
def test_what_a_full_disk_does_not_take_is_kept_and_written_first_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    journal = claim_journal(tmp_path, _Ticks())
    journal.append(_step(1))
    disk = _Disk(monkeypatch, room)
    failed = []
    for step in range(2, 30):
        try:
            journal.append(_step(step))
        except OSError:
            failed.append(step)
    assert failed and failed == list(range(failed[0], 30))
    # What a reader sees meanwhile is whole, and what it does not see is known here.
    assert _steps(tmp_path) == list(range(1, failed[0]))
    assert journal.num_waiting_bytes > 0
    with pytest.raises(OSError):
        journal.sync()
    disk.room = 1_000_000
    journal.append(_step(30))
    assert journal.num_waiting_bytes == 0
    steps = [event for event in read_events(tmp_path) if isinstance(event, StepDone)]
    # No line is torn, doubled or empty, and a record tells the time of its event.
    assert [(step.step, step.time) for step in steps] == [(step, float(step)) for step in range(1, 31)]
    assert len(journal.path.read_bytes().split(b"\n")) == 31


def test_a_sync_that_failed_does_not_count_and_everything_since_the_last_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of a write that it could not finish once, and may have dropped what it was."""
    journal = claim_journal(tmp_path)
    journal.append(_step(1))
    journal.sync()
    journal.append(_step(2))
    journal.append(_step(3))
    disk = _Disk(monkeypatch, 10_000)
    disk.syncs = False
    with pytest.raises(OSError, match="Input/output error"):
        journal.sync()
    assert journal.num_waiting_bytes == journal.path.stat().st_size - journal.path.read_bytes().index(b"\n") - 1
    # As a server that had no room does: the bytes are gone, and the file is as long as it was.
    content = journal.path.read_bytes()
    kept = content.index(b"\n") + 1
    journal.path.write_bytes(content[:kept] + bytes(len(content) - kept))
    disk.syncs = True
    journal.sync()
    assert journal.path.read_bytes() == content
    journal.append(_step(4))
    assert _steps(tmp_path) == [1, 2, 3, 4]


def test_closing_tries_once_more_and_says_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, lost = claim_journal(tmp_path), claim_journal(tmp_path)
    disk = _Disk(monkeypatch, 0)
    for journal in (kept, lost):
        with pytest.raises(OSError):
            journal.append(_step(journal.attempt))
    with pytest.raises(OSError, match="No space left"):
        lost.close()
    lost.close()
    disk.room = 1000
    kept.close()
    assert _steps(tmp_path) == [kept.attempt]


def test_what_memory_holds_is_bounded_by_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_ulysses.tracking.journal._MAX_UNSYNCED_BYTES", 500)
    journal = claim_journal(tmp_path)
    for step in range(50):
        journal.append(_step(step))
        assert len(journal._tail) <= 500
    assert _steps(tmp_path) == list(range(50))


def test_records_of_several_threads_are_whole(tmp_path: Path) -> None:
    journal = claim_journal(tmp_path)

    def write(first: int) -> None:
        for step in range(first, first + 100):
            journal.append(_step(step))
            if step % 10 == 0:
                journal.sync()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(0, 4000, 1000)))
    assert sorted(_steps(tmp_path)) == [1000 * number + step for number in range(4) for step in range(100)]
