"""What the ranks of an evaluation say is what the command says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.evaluation import run_evaluation
from ray_ulysses.parallel.local_ranks import RankDiedError


def evaluated_with(size: int, ranks: Any = None, gpus: int = 0) -> tuple[Any, list[str]]:
    said: list[str] = []
    prepared: Any = SimpleNamespace(request=SimpleNamespace(sp_size=size))
    with (
        mock.patch.object(run_evaluation, "run_local_ranks", ranks),
        mock.patch.object(run_evaluation.torch.cuda, "is_available", return_value=gpus > 0),
        mock.patch.object(run_evaluation.torch.cuda, "device_count", return_value=gpus),
    ):
        return run_evaluation.evaluate_locally(prepared, said.append), said


def test_a_process_that_dies_without_a_word_is_named() -> None:
    ranks = mock.Mock(side_effect=RankDiedError(1, "an error", "MemoryError"))
    with pytest.raises(RunError, match=r"--sp-size=2: process 1 ended without a result \(MemoryError\); use fewer"):
        evaluated_with(2, ranks)


def test_more_processes_than_gpus_are_refused() -> None:
    with pytest.raises(UserError, match="--sp-size=3: needs a GPU for each process, and this machine has 2; use at mo"):
        evaluated_with(3, gpus=2)


def test_what_the_first_rank_says_is_passed_on_and_its_report_is_returned() -> None:
    def ranks(work: Any, size: int, request: Any, *, hear: Any) -> str:
        assert (work, size, request.sp_size) == (run_evaluation._evaluate_rank, 2, 2)
        hear("loss over 100 tokens")
        return "report"

    assert evaluated_with(2, ranks) == ("report", ["loss over 100 tokens"])
