"""What processes leave on a GPU: contexts of ranks that have another one, and memory of those that were killed."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from ray_ulysses.elastic.reform import end_bound_s

HOST_GIB, DEVICE_GIB = 8, 12


def started(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.gpu.held_memory", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_child_that_is_killed_ends_in_time_and_the_next_one_waits_for_its_memory() -> None:
    torch.cuda.empty_cache()
    holds = started("hold", HOST_GIB, DEVICE_GIB)
    waits = None
    try:
        assert said(holds) == "held"
        waits = started("choose", 120)
        time.sleep(20.0)
        assert waits.poll() is None
        holds.kill()
        holds.wait(end_bound_s(HOST_GIB << 30))
        assert float(said(waits)) < 100.0
        assert waits.wait(30.0) == 0
    finally:
        for process in (holds, waits):
            if process is not None:
                process.kill()
                process.wait()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_of_the_second_gpu_opens_nothing_on_the_first() -> None:
    process = started("save_and_load")
    assert said(process) == "False"
    assert process.wait(60.0) == 0
