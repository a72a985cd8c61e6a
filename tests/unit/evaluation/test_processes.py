"""What a process of an evaluation says is what the command says."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch.multiprocessing.spawn import ProcessRaisedException

from ray_ulysses.errors import ConfigError, Problem, RunError, UserError
from ray_ulysses.evaluation import processes


def evaluated_with(size: int, spawn: Any, gpus: int = 0) -> list[str]:
    said: list[str] = []
    prepared: Any = SimpleNamespace(request=SimpleNamespace(sp_size=size))
    with (
        mock.patch.object(processes, "spawn", spawn),
        mock.patch.object(processes.torch.cuda, "is_available", return_value=gpus > 0),
        mock.patch.object(processes.torch.cuda, "device_count", return_value=gpus),
    ):
        processes.evaluate_locally(prepared, said.append)
    return said


@pytest.mark.parametrize(
    "error", [UserError("chunks=0"), RunError("damaged"), ConfigError([Problem(path="a", rule="b", hint="c")])]
)
def test_the_error_of_a_process_is_the_commands(error: Exception) -> None:
    def spawn(work: Any, args: Any, nprocs: int, join: bool) -> Any:
        with mock.patch.object(processes.dist, "init_process_group", side_effect=error), pytest.raises(type(error)):
            processes._run_rank(1, *args)
        raise ProcessRaisedException("a traceback", 1, 123)

    expected = RunError if isinstance(error, RunError) else UserError
    with pytest.raises(expected) as found:
        evaluated_with(2, spawn)
    assert str(found.value) == str(error)


def test_a_process_that_dies_without_a_word_is_named() -> None:
    def spawn(work: Any, args: Any, nprocs: int, join: bool) -> Any:
        raise ProcessRaisedException("Traceback:\nMemoryError", 1, 123)

    with pytest.raises(RunError, match=r"--sp-size=2: process 1 ended without a result \(MemoryError\); use fewer"):
        evaluated_with(2, spawn)


def test_more_processes_than_gpus_are_refused() -> None:
    with pytest.raises(UserError, match="--sp-size=3: needs a GPU for each process, and this machine has 2; use at mo"):
        evaluated_with(3, None, gpus=2)


def test_what_the_first_rank_says_is_passed_on_while_it_works_and_its_report_is_returned() -> None:
    def spawn(work: Any, args: Any, nprocs: int, join: bool) -> Any:
        assert (work, nprocs) == (processes._run_rank, 2)
        folder, said = Path(args[1]), args[3]

        def wait(timeout: float) -> bool:
            if not (folder / "report").exists():
                said.put("loss over 100 tokens")
                (folder / "report").write_bytes(pickle.dumps("report"))
                return False
            said.put("retrieval")
            return True

        return SimpleNamespace(join=wait)

    assert evaluated_with(2, spawn) == ["loss over 100 tokens", "retrieval"]
