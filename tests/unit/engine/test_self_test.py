"""The self-test's decisions: the worst error of all ranks, law 1's metric, and the result of local ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from ray_ulysses.engine import self_test_local
from ray_ulysses.engine.self_test import find_worst, step_bound, worst_error
from ray_ulysses.engine.self_test_attention import slice_error
from ray_ulysses.engine.self_test_local import self_test_on, self_test_rank
from ray_ulysses.errors import RunError
from ray_ulysses.parallel.local_ranks import RankDiedError

NAN, INF = float("nan"), float("inf")


def test_the_worst_rank_of_each_number_is_found_and_nan_is_an_infinite_error() -> None:
    first, second = find_worst(["a", "b"], [[1e-7, 3.0], [2e-7, NAN], [1e-8, 0.1]], [1e-5, 0.5])
    assert (first.rank, first.error, first.wrong_ranks) == (1, 2e-7, ())
    assert (second.what, second.rank, second.error, second.wrong_ranks) == ("b", 1, INF, (0, 1))
    # An error in the single process, too, does not loosen the bound without limit.
    assert [step_bound(1e-5, own) for own in (1e-7, 1e-4, INF)] == [1e-5, 2e-4, 1e-5]


def test_a_slice_is_held_against_its_share_of_the_row() -> None:
    whole = torch.tensor([3.0, 4.0, 0.0, 0.0])
    assert slice_error(whole[:2] + 0.5, whole[:2], whole) == pytest.approx(0.5 * 2**0.5 / (5 / 2**0.5))
    assert slice_error(torch.tensor([1e-9, 0.0]), whole[2:], whole) < 1e-8


def test_gradients_are_held_to_law_1_tensor_by_tensor() -> None:
    truth = {"big": torch.ones(100), "small": torch.full((4,), 1e-3), "zero": torch.zeros(3)}
    ours = {"big": torch.ones(100), "small": torch.full((4,), 2e-3), "zero": torch.full((3,), 1e-9)}
    error, name = worst_error(ours, truth)
    assert (name, round(error, 6)) == ("small", 1.0)
    assert worst_error({**ours, "zero": torch.full((3,), NAN)}, truth) == (INF, "zero")


@pytest.mark.parametrize(
    ("end", "text", "hint"),
    [
        ("passed in 1 s", "passed in 1 s", ""),
        (RunError("attention differs", "look here"), "attention differs", "look here"),
        (RankDiedError(0, "exit code 1", "no such library"), "process 0 ended with exit code 1: no such", "fix the"),
        (TimeoutError(), "not finished after 20 s", "check the machine's load"),
    ],
)
def test_the_end_of_the_ranks_is_the_outcome(end: Any, text: str, hint: str) -> None:
    with mock.patch.object(self_test_local, "run_local_ranks", side_effect=[end]):
        result = self_test_on(self_test_rank, 2, 20.0)
    assert result.ok == isinstance(end, str)
    assert result.text.startswith(text) and result.hint.startswith(hint)
