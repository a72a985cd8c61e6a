"""Local ranks form a group, and their end is known: a result, the first error of ours, a death or a hang."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ray_ulysses.errors import ConfigError, Problem, UserError
from ray_ulysses.parallel.local_ranks import RankDiedError, run_local_ranks

CONFIG_ERROR = ConfigError([Problem(path="a", rule="b", hint="c")])


def summed(device: torch.device, say: Any, start: int) -> int:
    say("it begins")
    ranks = torch.tensor(start + dist.get_rank(), device=device)
    dist.all_reduce(ranks)
    return int(ranks)


def raises(device: torch.device, say: Any) -> None:
    say("it begins")
    if dist.get_rank() == 1:
        raise CONFIG_ERROR
    dist.barrier()


def ends(device: torch.device, say: Any) -> None:
    print("no such library", flush=True)
    sys.exit(1)


def raises_and_stays(device: torch.device, say: Any) -> None:
    threading.Thread(target=time.sleep, args=(300,)).start()
    raise CONFIG_ERROR


def hangs(device: torch.device, say: Any) -> None:
    time.sleep(60)


def test_the_first_rank_reports_progress_and_returns_the_result() -> None:
    said: list[str] = []
    assert (run_local_ranks(summed, 2, 3, hear=said.append), said) == (7, ["it begins"])


def test_the_error_of_a_rank_is_raised_here() -> None:
    said: list[str] = []
    with pytest.raises(UserError) as found:
        run_local_ranks(raises, 2, hear=said.append)
    assert (str(found.value), said) == (str(CONFIG_ERROR), ["it begins"])


def test_the_error_of_a_rank_that_does_not_end_is_raised_too() -> None:
    started = time.monotonic()
    with pytest.raises(UserError) as found:
        run_local_ranks(raises_and_stays, 1)
    assert str(found.value) == str(CONFIG_ERROR)
    assert time.monotonic() - started < 120


def test_a_rank_that_dies_is_named_with_its_last_line() -> None:
    with pytest.raises(RankDiedError) as found:
        run_local_ranks(ends, 1)
    assert (found.value.rank, found.value.how, found.value.last_line) == (0, "exit code 1", "no such library")


def test_ranks_that_hang_are_ended_within_the_bound() -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        run_local_ranks(hangs, 1, limit_s=0.5)
    assert time.monotonic() - started < 30
