"""What explains a slow step, an out-of-memory error or a hang is written into the run's directory."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

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
    # The format of Chrome's traces: Perfetto reads it, compressed too.
    trace = json.loads(gzip.decompress((tmp_path / TRACE).read_bytes()))
    assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])


@pytest.mark.parametrize(
    "profile",
    [None, ProfileSection(steps=(9, 11), ranks=(2,)), ProfileSection(steps=(10,))],
    ids=["no", "step", "rank"],
)
def test_other_steps_and_ranks_are_not_traced(profile: ProfileSection | None, tmp_path: Path) -> None:
    with diagnostics(tmp_path).profiled(profile, 10, lambda: pytest.fail("nothing is written")):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_can_not_be_written_ends_no_run(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    with diagnostics(tmp_path / "gone").profiled(TRACED, 10, lambda: None):
        pass
    assert TRACE in said.text


class Memory:
    """PyTorch's module of GPU memory, as far as it is used."""

    def __init__(self) -> None:
        self.recorded: list[dict[str, Any]] = []
        self.observers: list[Any] = []

    def _record_memory_history(self, **options: Any) -> None:
        self.recorded.append(options)

    def _snapshot(self) -> dict[str, Any]:
        return {"segments": [{"device": 0}], "device_traces": []}


def test_memory_is_recorded_for_two_steps_and_kept_as_it_was_when_it_ran_out(tmp_path: Path) -> None:
    memory = Memory()
    recorder = MemoryRecorder(GPU, memory, memory.observers.append)
    assert [one["stacks"] for one in memory.recorded] == ["python"]
    recorder.step_done()
    assert len(memory.recorded) == 1 and recorder.snapshot is None
    recorder.step_done()
    recorder.step_done()
    assert memory.recorded[1:] == [{"enabled": None}]
    (observer,) = memory.observers
    # The device, the allocation, and the device's own numbers.
    observer(0, 2**30, 2**36, 2**20)
    left = diagnostics(tmp_path).leave_snapshot(10, recorder.snapshot)
    assert left == "diagnostics/attempt-0003/memory/step-00000010-rank-00002.pickle"
    assert pickle.loads((tmp_path / left).read_bytes()) == memory._snapshot()


def test_on_a_cpu_no_memory_is_recorded() -> None:
    memory = Memory()
    MemoryRecorder(CPU, memory, memory.observers.append).step_done()
    assert memory.recorded == memory.observers == []


def test_the_thread_that_leaves_a_flight_record_uses_the_ranks_own_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda.installed(monkeypatch)

    def dump() -> bytes:
        cuda.touch()
        return b"record"

    monkeypatch.setattr("torch._C._distributed_c10d._dump_nccl_trace", dump, raising=False)
    key = diagnostics(tmp_path, torch.device("cuda", 3)).leave_flight_record()
    assert key is not None and (tmp_path / key).read_bytes() == b"record"
    assert cuda.strays == []
