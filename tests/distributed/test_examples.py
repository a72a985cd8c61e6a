"""The loops of examples/, run as their reader runs them, against one process that trains each document by itself."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
_LINE = re.compile(r"^step=\d+ loss=(\S+) grad_norm=(\S+)$", re.MULTILINE)


@cache
def reference() -> list[tuple[float, float]]:
    """Return each step's loss and gradient norm of one process, with Transformers' own attention."""
    spec = importlib.util.spec_from_file_location("tiny_example", EXAMPLES / "tiny.py")
    assert spec is not None
    assert spec.loader is not None
    tiny: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
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


@pytest.mark.distributed
@pytest.mark.parametrize("loop", ["ddp", "fsdp2", "deepspeed_zero3"])
def test_a_loop_trains_as_one_process_does(loop: str) -> None:
    # Rows are shared by two ranks, two groups have two rows each: a scale that is off by any of these sizes shows.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, str(EXAMPLES / f"{loop}.py"), "--sp-size", "2"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    printed = [(float(loss), float(norm)) for loss, norm in _LINE.findall(done.stdout)]
    wanted = reference()
    assert len(printed) == len(wanted) == 3, done.stdout
    # Law 1's floor for losses and gradients, in every step: the later ones show that the weights moved alike.
    for found, truth in zip(printed, wanted, strict=True):
        assert found == pytest.approx(truth, rel=1e-5)
