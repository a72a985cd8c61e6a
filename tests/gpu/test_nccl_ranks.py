"""Several ranks on one GPU over NCCL: the self-test, law 1, and the loops of examples/."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.test_examples import EXAMPLES, LOOPS, check
from tests.distributed.test_nccl_cases import run_all


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_gpu_are_exact_over_nccl(ranks: int) -> None:
    for name, words in run_all(ranks, "cuda").items():
        print(f"{ranks} ranks, {name}: {words}")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_trains_under_torchrun_on_one_gpu(loop: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    wrapper = Path(__file__).with_name("one_gpu_rank.py")
    done = subprocess.run(
        [*command, str(wrapper), str(EXAMPLES / f"{loop}.py"), "--sp-size", "2"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    check(done.stdout)
