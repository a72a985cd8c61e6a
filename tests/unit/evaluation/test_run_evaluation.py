"""The command passes on the first rank's messages and report."""

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


def test_a_process_that_dies_is_named_and_too_many_processes_are_refused() -> None:
    ranks = mock.Mock(side_effect=RankDiedError(1, "an error", "MemoryError"))
    with pytest.raises(RunError, match=r"--sp-size=2: process 1 ended without a result \(MemoryError\); use fewer"):
        evaluated_with(2, ranks)
    with pytest.raises(UserError, match="--sp-size=3: requires one GPU per process, but this machine has 2; use at mo"):
        evaluated_with(3, gpus=2)


def test_the_first_ranks_messages_and_report_are_passed_on() -> None:
    def ranks(work: Any, size: int, request: Any, *, hear: Any) -> str:
        assert (work, size, request.sp_size) == (run_evaluation._evaluate_rank, 2, 2)
        hear("loss over 100 tokens")
        return "report"

    assert evaluated_with(2, ranks) == ("report", ["loss over 100 tokens"])
