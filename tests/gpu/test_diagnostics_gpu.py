"""What explains a slow step, a lack of memory or a hang is found on a GPU, too; so are versions and NCCL's log."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

from ray_ulysses.parallel.gpu_environment import ALLOCATOR

# In a process of its own, whose allocator and NCCL have not begun.
_RANK = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from ray_ulysses.config.learning import ProfileSection
from ray_ulysses.parallel.gpu_environment import expand_segments, keep_nccl_log, nccl_log
from ray_ulysses.trainer.diagnostics import Diagnostics, MemoryRecorder

expand_segments(os.environ)
keep_nccl_log(os.environ)
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
dist.init_process_group("nccl", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
run = Diagnostics(run_dir=Path(sys.argv[1]), attempt=1, rank=0, device=device)
recorder = MemoryRecorder(device)

def holds_memory():
    return torch.ones(1 << 24, device=device)

held = holds_memory()
dist.all_reduce(held)
with run.profiled(ProfileSection(steps=(1,)), 1, print):
    torch.mm(held.view(4096, 4096), held.view(4096, 4096))
try:
    torch.empty(1 << 50, device=device)
except torch.OutOfMemoryError:
    snapshot = run.leave_snapshot(1, recorder.snapshot)
print(json.dumps({
    "settings": torch._C._accelerator_getAllocatorSettings(),
    "log": nccl_log(os.environ),
    "snapshot": snapshot,
    "record": run.leave_flight_record(),
}))
"""


def test_each_is_left_by_a_rank_on_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in (*ALLOCATOR, "NCCL_DEBUG")}
    command = [sys.executable, "-c", _RANK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["settings"] == "expandable_segments:True"
    assert "NCCL INFO" in found["log"]
    snapshot = pickle.loads((tmp_path / found["snapshot"]).read_bytes())
    assert "holds_memory" in str(snapshot["segments"]), "the code that has allocated a block is in it"
    entries = pickle.loads((tmp_path / found["record"]).read_bytes())["entries"]
    assert any("all_reduce" in entry["profiling_name"] for entry in entries)
    (trace,) = tmp_path.glob("diagnostics/**/*.json.gz")
    kinds = {event.get("cat") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert "kernel" in kinds


def test_doctor_says_the_versions_that_are_there() -> None:
    from ray_ulysses.commands.doctor import check_accelerator

    checks = {one.name: one for one in check_accelerator()}
    assert {"accelerator", "driver", "cudnn", "collectives"} == set(checks)
    assert all(one.level == "ok" and "unknown" not in one.detail for one in checks.values()), checks
