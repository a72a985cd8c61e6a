"""The harness itself: values by rank, errors with a traceback, deaths and hangs that end."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import RankFailure, run_ranks, run_ranks_to_outcomes


def _sum_of_ranks(rank: int, world_size: int, offset: int) -> float:
    value = torch.tensor([float(rank + offset)], requires_grad=True)
    (value * 2).sum().backward()
    total = value.detach().clone()
    dist.all_reduce(total)
    return float(total)


def _raise_on(rank: int, world_size: int, which: int) -> None:
    if rank == which:
        raise ValueError("planted")
    dist.barrier()


def _die_on(rank: int, world_size: int, which: int) -> Any:
    if rank == which:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    return rank


def _hang(rank: int, world_size: int) -> None:
    time.sleep(60)


def test_every_rank_returns_its_value() -> None:
    torch.ones(2, requires_grad=True).sum().backward()  # autograd threads in the parent must not matter
    assert run_ranks(_sum_of_ranks, 3, 1) == [6.0, 6.0, 6.0]


def test_an_exception_is_reported_with_its_rank_and_traceback() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 raised:[\s\S]*ValueError: planted"):
        run_ranks(_raise_on, 2, 1)


def test_a_killed_rank_is_reported_with_its_signal() -> None:
    outcomes = run_ranks_to_outcomes(_die_on, 2, 1, process_group=False)
    assert outcomes[0].value == 0
    assert outcomes[1].exit_code == -signal.SIGKILL


def test_a_hang_ends_with_the_stacks() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"hung[\s\S]*in _hang"):
        run_ranks(_hang, 1, timeout_s=3.0)
    assert time.monotonic() - start < 20
