"""The loops of examples/ against one process that trains each document by itself."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.distributed.harness import run_ranks

LOOPS = ("ddp", "fsdp2", "deepspeed_zero3", "hf_trainer")
EXAMPLES = Path(__file__).parents[2] / "examples"
_LINE = re.compile(r"^step=\d+ loss=(\S+) grad_norm=(\S+)$", re.MULTILINE)


@cache
def reference() -> list[tuple[float, float]]:
    tiny = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "tiny.py")))
    model = tiny.make_model()
    model.set_attn_implementation("eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = []
    for step in range(tiny.STEPS):
        documents = [d for n in range(tiny.ROWS_PER_STEP) for d in tiny.make_row(step, n).split(tiny.DOCUMENT_LENGTHS)]
        count = sum(len(document) - 1 for document in documents)
        loss = torch.zeros(())
        for document in documents:
            logits = model(input_ids=document[None], use_cache=False).logits[0, :-1]
            part = torch.nn.functional.cross_entropy(logits, document[1:], reduction="sum") / count
            part.backward()
            loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((float(loss), float(norm)))
    return steps


def run_example(rank: int, world_size: int, loop: str, folder: str) -> None:
    """Be one process that torchrun has started; what it prints goes to a file per rank."""
    script = EXAMPLES / f"{loop}.py"
    sys.argv = [str(script), "--sp-size", "2"]
    sys.path.insert(0, str(EXAMPLES))
    with open(f"{folder}/rank-{rank}.txt", "w") as stream, redirect_stdout(stream):
        runpy.run_path(str(script), run_name="__main__")


def check(printed: str) -> None:
    """Hold what a loop printed against the reference."""
    found = [(float(loss), float(norm)) for loss, norm in _LINE.findall(printed)]
    wanted = reference()
    assert len(found) == len(wanted) == 5, printed
    # Law 1's floor for losses and gradients, in every step: the later ones show that the weights moved alike.
    for ours, truth in zip(found, wanted, strict=True):
        assert ours == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_trains_as_one_process_does(loop: str, tmp_path: Path) -> None:
    # Rows are shared by two ranks, two groups have two rows each: a scale that is off by any of these sizes shows.
    run_ranks(run_example, 4, loop, str(tmp_path), process_group=False)
    check((tmp_path / "rank-0.txt").read_text())


def test_the_trainer_of_transformers_takes_at_most_60_lines() -> None:
    assert len((EXAMPLES / "hf_trainer.py").read_text().splitlines()) <= 60


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_trains_under_torchrun(loop: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, str(EXAMPLES / f"{loop}.py"), "--sp-size", "2"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    check(done.stdout)
