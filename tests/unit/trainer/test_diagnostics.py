"""Profiles, memory snapshots and flight records are written to the run directory."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from ray_ulysses.config.learning import ProfileSection
from ray_ulysses.trainer.diagnostics import Diagnostics, MemoryRecorder
from tests.unit.fake_cuda import FakeCuda

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TRACE = "diagnostics/attempt-0003/profile/step-00000010-rank-00002.json.gz"
TRACED = ProfileSection(steps=(10,), ranks=(2,))


def diagnostics(folder: Path, device: torch.device = CPU) -> Diagnostics:
    return Diagnostics(run_dir=folder, attempt=3, rank=2, device=device)


def test_the_trace_of_a_step_is_a_file_that_perfetto_opens(tmp_path: Path) -> None:
    beats: list[int] = []
    with diagnostics(tmp_path).profiled(TRACED, 10, lambda: beats.append(1)):
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [tmp_path / TRACE] and beats == [1]
    trace = json.loads(gzip.decompress((tmp_path / TRACE).read_bytes()))
    assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])


@pytest.mark.parametrize(
    "profile",
    [None, ProfileSection(steps=(9, 11), ranks=(2,)), ProfileSection(steps=(10,))],
    ids=["no", "step", "rank"],
)
def test_other_steps_and_ranks_are_not_traced_and_an_unwritten_trace_ends_nothing(
    profile: ProfileSection | None, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    with diagnostics(tmp_path).profiled(profile, 10, lambda: pytest.fail("nothing is written")):
        pass
    assert list(tmp_path.iterdir()) == []
    with diagnostics(tmp_path / "gone").profiled(TRACED, 10, lambda: None):
        pass
    assert TRACE in said.text


def test_memory_is_recorded_for_two_steps_and_kept_as_it_was_when_it_ran_out(tmp_path: Path) -> None:
    memory, observers = Mock(**{"_snapshot.return_value": {"device_traces": []}}), list[Any]()
    recorder = MemoryRecorder(GPU, memory, observers.append)
    record = memory._record_memory_history
    recorder.step_done()
    assert [one.kwargs["stacks"] for one in record.mock_calls] == ["python"] and recorder.snapshot is None
    recorder.step_done()
    recorder.step_done()
    assert record.mock_calls[1:] == [call(enabled=None)]
    (observer,) = observers
    # The arguments are the device, the allocation, and the device's total and free memory.
    observer(0, 2**30, 2**36, 2**20)
    left = diagnostics(tmp_path).leave_snapshot(10, recorder.snapshot)
    assert left == "diagnostics/attempt-0003/memory/step-00000010-rank-00002.pickle"
    assert pickle.loads((tmp_path / left).read_bytes()) == memory._snapshot()
    on_cpu = Mock()
    MemoryRecorder(CPU, on_cpu, on_cpu.observe).step_done()
    assert on_cpu.mock_calls == []


def test_the_flight_record_thread_uses_the_ranks_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda.installed(monkeypatch)

    def dump() -> bytes:
        cuda.touch()
        return b"record"

    monkeypatch.setattr("torch._C._distributed_c10d._dump_nccl_trace", dump, raising=False)
    key = diagnostics(tmp_path, torch.device("cuda", 3)).leave_flight_record()
    assert key is not None and (tmp_path / key).read_bytes() == b"record"
    assert cuda.strays == []
