"""An export's memory does not grow with the model: a fresh process exports a model larger than the memory bound."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
_LARGEST_GROWTH_BYTES = 200 * 10**6
_SHARD_BYTES = 50 * 10**6

_WRITE = """
import sys
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from tests.unit.export.runs import fields_of, write_checkpoint, write_config

config = AutoConfig.for_model(
    "llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=7, num_attention_heads=8,
    num_key_value_heads=8, vocab_size=32768, tie_word_embeddings=True,
)
torch.set_default_dtype(torch.float32)
model = AutoModelForCausalLM.from_config(config)
run_dir = Path(sys.argv[1])
write_config(run_dir, fields_of(config), "fp32")
write_checkpoint(run_dir, model, moments=False)
"""

_EXPORT = """
import gc, json, sys, time
from pathlib import Path
from ray_ulysses.export.export_run import export_run
from ray_ulysses.export.report import ExportRequest

def resident(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) * 1024

def export(weights, out):
    request = ExportRequest(
        run_dir=Path(sys.argv[1]), out=Path(sys.argv[2]) / out, weights=weights, max_shard_bytes=int(sys.argv[3]),
        check=False,
    )
    started = time.monotonic()
    report = export_run(request, lambda line: None)
    return report.num_bytes, report.weight_files, time.monotonic() - started

# Memory that Transformers uses for any model does not count.
from ray_ulysses.config import load_config
from ray_ulysses.export.architecture import describe
describe(load_config(Path(sys.argv[1]) / "config.yaml"), "fp32")
gc.collect()
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
num_bytes, num_files, seconds = export(sys.argv[4], sys.argv[4])
growth = resident("VmHWM") - before
print(json.dumps({"growth": growth, "bytes": num_bytes, "files": num_files, "seconds": seconds}))
"""


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("large") / "run"
    run(_WRITE, str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_bounded_by_a_few_chunks(run_dir: Path, tmp_path: Path) -> None:
    weights, least_bytes = "bf16", 300 * 10**6
    found = json.loads(run(_EXPORT, str(run_dir), str(tmp_path), str(_SHARD_BYTES), weights).splitlines()[-1])
    print(weights, found)
    assert found["bytes"] > least_bytes
    assert found["files"] > least_bytes / _SHARD_BYTES
    assert found["growth"] < _LARGEST_GROWTH_BYTES
    shutil.rmtree(tmp_path / weights)
