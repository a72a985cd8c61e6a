"""Tensors are read in parts within one stored interval, in batches that fit a buffer, in bounded memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from ray_ulysses.export.stream import ElementRange, batches, divide
from ray_ulysses.export.tensors import Stored
from tests.unit.export.runs import fields_of, write_checkpoint, write_config

WIDE = Stored(key="fp32/a", shape=(1000,), dtype=torch.float32, published=torch.bfloat16)


_INNER = st.sets(st.integers(1, 999), max_size=8)


@given(st.integers(0, 999), st.integers(0, 1000), _INNER, st.sampled_from([16, 64, 256, 8192]))
def test_a_range_is_divided_at_intervals_and_blocks(start: int, length: int, inner: set[int], most: int) -> None:
    stop = min(start + length, 1000)
    borders = [0, *sorted(inner)]
    parts = list(divide(ElementRange(stored=WIDE, start=start, stop=stop), borders, most))
    reached = start
    for part in parts:
        assert part.start == reached < part.stop
        assert part.stored_bytes <= most
        begin = max(border for border in borders if border <= part.start)
        assert all(not part.start < border < part.stop for border in borders)
        assert part.start == start or (part.start - begin) * 4 % most == 0
        reached = part.stop
    assert reached == max(start, stop)


@given(st.lists(st.integers(1, 50), max_size=40))
def test_batches_keep_the_order_and_fit_a_buffer(lengths: list[int]) -> None:
    parts = [ElementRange(stored=WIDE, start=0, stop=length) for length in lengths]
    found = list(batches(parts, 1024))
    assert [part for batch in found for part in batch] == parts
    assert all(batch for batch in found)
    for batch in found:
        # Parts are aligned to 64 bytes.
        assert sum(-(-part.stored_bytes // 64) * 64 for part in batch) <= 1024


_EXPORT = """
import gc, json, sys
from pathlib import Path
from ray_ulysses.config import load_config
from ray_ulysses.export.architecture import describe
from ray_ulysses.export.export_run import export_run
from ray_ulysses.export.report import ExportRequest

def resident(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) * 1024

run_dir = Path(sys.argv[1])
# Memory that Transformers uses for any model does not count.
describe(load_config(run_dir / "config.yaml"), "fp32")
gc.collect()
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
report = export_run(ExportRequest(run_dir=run_dir, weights="bf16", max_shard_bytes=50 * 10**6, check=False), print)
print(json.dumps([resident("VmHWM") - before, report.num_bytes, report.weight_files]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_bounded_by_a_few_chunks(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=7, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=32768, tie_word_embeddings=True,
    )  # fmt: skip
    write_config(tmp_path / "run", fields_of(config), "fp32")
    write_checkpoint(tmp_path / "run", AutoModelForCausalLM.from_config(config), moments=False)
    command, root = [sys.executable, "-c", _EXPORT, str(tmp_path / "run")], Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=root, check=True)
    growth, num_bytes, num_files = json.loads(done.stdout.splitlines()[-1])
    assert num_bytes > 300 * 10**6 and num_files > 6
    assert growth < 200 * 10**6
    shutil.rmtree(tmp_path / "run")
