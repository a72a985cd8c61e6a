"""Rank 0's records, including while the journal's disk is full or hangs."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch

import ray_ulysses.trainer.record as module
from ray_ulysses.checkpoint.errors import StorageFailedError
from ray_ulysses.checkpoint.messenger import SingleRankMessenger
from ray_ulysses.errors import RunError
from ray_ulysses.parallel.layout import ParallelLayout
from ray_ulysses.run.settings import resolve_run
from ray_ulysses.run.start_point import RunPosition
from ray_ulysses.storage import background
from ray_ulysses.tracking.events import AttemptEnded, AttemptStarted, StepDone, StreamStarted
from ray_ulysses.tracking.journal import claim_journal
from ray_ulysses.tracking.journal_reader import JournalFileReader
from ray_ulysses.trainer.context import AttemptContext
from ray_ulysses.trainer.record import Recorder, SystemMeter
from ray_ulysses.trainer.worker import Worker
from tests.distributed.run_case import make_config
from tests.unit.tracking.journals import read_events
from tests.unit.trainer.conftest import HandClock
from tests.unit.trainer.test_step import result


class Disk:
    """A disk that can be full, or hang until a gate opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full, self.gate, self.entered = False, threading.Event(), threading.Event()
        self.gate.set()
        self._patch, self._pwrite = monkeypatch, os.pwrite
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def hang(self) -> None:
        self.gate.clear()
        self.entered.clear()
        self._patch.setattr(background, "PROMPT_S", 0.05)

    def pwrite(self, descriptor: int, content: bytes, place: int) -> int:
        self.entered.set()
        assert self.gate.wait(60.0)
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._pwrite(descriptor, content, place)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def begun(folder: Path, *, begins: bool = True, system: bool = False, engine: str = "local", **fields: Any) -> Recorder:
    changes = {
        "cluster__workers": 1, "parallel__sp_size": 1, "tracking__enabled": system, "data__engine": engine,
        "run__log_every_steps": 1,
    }  # fmt: skip
    config = make_config(folder, folder / "corpus", **changes)
    worker = Worker(
        rank=0, local_rank=0, world_size=1, node="n", device=torch.device("cpu"), session="one",
        make_source=lambda *_: None, **fields,
    )  # fmt: skip
    run, alone = resolve_run(config), SingleRankMessenger()
    context = AttemptContext(run=run, worker=worker, attempt=1, nodes=("n",), messenger=alone, save_messenger=alone)
    recorder = Recorder(context, claim_journal(config.run_dir))
    if begins:
        begin(recorder)
    return recorder


def begin(recorder: Recorder) -> None:
    plan: Any = SimpleNamespace(segments=[SimpleNamespace(plan_id="p")], plan_id="p")
    stage: Any = SimpleNamespace(plan=plan, name="", run_last_step=None)
    recorder.attempt_started(RunPosition(), 10, stage, ParallelLayout(world_size=1, sp_size=1))


def train(recorder: Recorder, *steps: int, direct_rows: int = 0) -> None:
    for step in steps:
        found = result(1.0, direct_rows=direct_rows)
        recorder.step_done(step, found, range(step - 1, step), {"loss": 1.0, "seconds": 1.0})


def recorded(folder: Path) -> list[Any]:
    return [getattr(event, "step", event.event) for event in read_events(folder / "run")]


@pytest.mark.parametrize("system", [True, False])
def test_the_load_since_the_last_reading_is_recorded_for_trackers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, system: bool
) -> None:
    counted = SimpleNamespace(bytes_recv=5e6, bytes_sent=7e6)
    monkeypatch.setattr(psutil, "net_io_counters", lambda: counted)
    recorder = begun(tmp_path, system=system)
    counted.bytes_recv, counted.bytes_sent = 8e6, 7.5e6
    train(recorder, 1)
    recorder.ended("finished", 1)
    events = JournalFileReader(tmp_path / "run/journal/attempt-0001.jsonl", 1).read_singly()
    (found,) = [one.system for one, _ in events if isinstance(one, StepDone)]
    assert (found is not None) is system
    if found is not None:
        assert 0 <= found["system/cpu_utilization_percentage"] <= 100
        assert (found["system/network_receive_megabytes"], found["system/network_transmit_megabytes"]) == (3.0, 0.5)
        free = psutil.disk_usage(os.sep).free / 1e6
        assert found["system/disk_available_megabytes"] == pytest.approx(free, rel=0.5)


def test_a_system_that_answers_nothing_costs_no_step_and_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_io_counters", lambda: None)
    assert SystemMeter(torch.device("cpu")).read()["system/network_receive_megabytes"] == 0.0
    for name in ("virtual_memory", "cpu_percent", "net_io_counters"):
        monkeypatch.setattr(psutil, name, Mock(side_effect=PermissionError("/proc")))
    assert SystemMeter(torch.device("cpu")).read() == {}


@pytest.mark.parametrize("engine", ["ray", "local"])
def test_the_first_step_without_a_row_read_directly_is_recorded_once(tmp_path: Path, engine: str) -> None:
    recorder = begun(tmp_path, engine=engine)
    train(recorder, 1, direct_rows=3)
    train(recorder, 2, direct_rows=1)
    train(recorder, 3, 4)
    recorder.ended("finished", 4)
    events = read_events(tmp_path / "run")
    assert [one.streams for one in events if isinstance(one, AttemptStarted)] == [engine == "ray"]
    found = [(one.step, one.direct_rows) for one in events if isinstance(one, StreamStarted)]
    assert found == ([(3, 4)] if engine == "ray" else [])


def test_no_record_is_lost_over_a_full_disk(tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    recorder = begun(tmp_path)
    train(recorder, 1, 2)
    assert recorder._calls.wait(20.0)
    disk.is_full = True
    train(recorder, 3, 4, 5)
    recorder.checkpoint_failed(5, "full")
    recorder.preemption_noticed(5)
    assert recorder._calls.wait(20.0)
    assert recorded(tmp_path) == ["attempt_started", 1, 2]
    warnings = [record.getMessage() for record in caplog.records if "the journal" in record.getMessage()]
    assert len(warnings) == 1 and "attempt-0001.jsonl" in warnings[0] and "run.storage" in warnings[0]
    with pytest.raises(OSError, match="No space left on device"):
        recorder.sync()
    disk.is_full = False
    recorder.sync()
    assert recorded(tmp_path) == ["attempt_started", 1, 2, 3, 4, 5, 5, 5]
    recorder.ended("finished", 5)
    assert recorded(tmp_path)[-2:] == ["attempt_ended", 5]


def test_the_time_for_which_training_is_paused_is_of_the_next_step_or_the_end(tmp_path: Path) -> None:
    clock = HandClock(130.0)
    recorder = begun(tmp_path, clock=clock)
    train(recorder, 1)
    with recorder.time.saving():
        clock.time += 3.0
    train(recorder, 2)
    with recorder.time.saving():
        clock.time += 1.0
    recorder.ended("finished", 2)
    events = read_events(tmp_path / "run")
    assert [one.saving_seconds for one in events if isinstance(one, StepDone | AttemptEnded)] == [0.0, 3.0, 1.0]


def test_too_many_waiting_records_end_it(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING_BYTES", 3 * module._CALL_BYTES)
    recorder = begun(tmp_path, begins=False)
    disk.is_full = True
    with pytest.raises(RunError, match=r"attempt-0001\.jsonl can't be written \(No space left on device\)"):
        begin(recorder)
    train(recorder, *range(1, 21))
    assert recorder.storage_failure() is None
    train(recorder, *range(21, 100))
    failure = recorder.storage_failure()
    assert isinstance(failure, StorageFailedError)
    assert "No space left on device" in str(failure) and "run.storage" in str(failure)


def test_no_record_is_lost_while_the_storage_hangs(tmp_path: Path, disk: Disk) -> None:
    recorder = begun(tmp_path)
    disk.hang()
    train(recorder, *range(1, 200))
    assert recorded(tmp_path) == ["attempt_started"]
    position = recorder.journal_position()["bytes"]
    disk.gate.set()
    recorder.sync()
    assert recorded(tmp_path) == ["attempt_started", *range(1, 200)]
    assert position == (tmp_path / "run/journal/attempt-0001.jsonl").stat().st_size
    recorder.ended("finished", 199)


@pytest.mark.parametrize("limit", ["time", "memory"])
def test_a_storage_that_hangs_for_too_long_ends_the_attempt_by_name(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, limit: str
) -> None:
    clock = HandClock(100.0)
    recorder = begun(tmp_path, clock=clock)
    disk.hang()
    train(recorder, 1)
    assert disk.entered.wait(20.0)
    clock.time += 299.0
    train(recorder, 2)
    assert recorder.storage_failure() is None
    assert "has not responded for 299 s" in caplog.text
    if limit == "time":
        clock.time += 2.0
    else:
        monkeypatch.setattr(module, "_MOST_WAITING_BYTES", 3 * module._CALL_BYTES)
    train(recorder, *range(3, 100))
    failure = recorder.storage_failure()
    assert isinstance(failure, StorageFailedError)
    assert "run.storage has not responded for " in str(failure)
    # The ranks have agreed to end, so a late response changes nothing.
    disk.gate.set()
    assert recorder._calls.wait(20.0)
    assert recorder.storage_failure() is failure
    recorder.failed(ValueError("the cause"))


def test_no_checkpoint_relies_on_unwritten_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PROMPT_S", 0.05)
    recorder = begun(tmp_path)
    entered, found = threading.Event(), []
    journal: Any = recorder._journal
    sync = journal.sync

    def watched() -> None:
        found.append(recorded(tmp_path))
        entered.set()
        sync()

    monkeypatch.setattr(journal, "sync", watched)
    # Block the journal's thread until the journal is synced, which must not happen before.
    recorder._calls.ask(lambda: entered.wait(0.5))
    train(recorder, 1, 2)
    recorder.sync()
    assert found == [["attempt_started", 1, 2]]


def test_an_end_whose_journal_can_not_be_closed_is_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = begun(tmp_path)
    monkeypatch.setattr(recorder._journal, "close", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(RunError, match=r"attempt-0001\.jsonl .*Input/output error") as ended:
        recorder.ended("finished", 1)
    recorder.failed(ended.value)
    # Nothing waits for the finished thread, and no second end is recorded.
    assert "has not responded" not in caplog.text
    assert [event.event for event in read_events(tmp_path / "run")][1:] == ["attempt_ended", "run_finished"]


@pytest.mark.parametrize("how", ["full", "written", "watched"])
def test_a_failure_hides_nothing(tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture, how: str) -> None:
    before = set(threading.enumerate())
    recorder = begun(tmp_path, is_watched=how == "watched")
    (thread,) = set(threading.enumerate()) - before
    disk.is_full = True
    train(recorder, 1)
    disk.is_full = how == "full"
    recorder.failed(ValueError("the cause"))
    thread.join(20.0)
    assert not thread.is_alive()
    ends = {"full": [], "written": [1, "attempt_ended"], "watched": [1]}
    assert recorded(tmp_path) == ["attempt_started", *ends[how]]
    assert ("unwritten records are lost when this process exits" in caplog.text) == (how == "full")
