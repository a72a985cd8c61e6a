"""ZeRO state: saved at one world size, loaded bitwise at another, and training goes on as before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from ray_ulysses.checkpoint import read_manifest
from ray_ulysses.storage import LocalStore
from tests.breadth import fast_only
from tests.distributed.harness import RankFailure, run_ranks
from tests.distributed.zero_state_case import FROZEN, VOCAB, Leg, LegResult, canonical, description_of, run_leg

pytestmark = pytest.mark.distributed

SAVED_AT, LAST = 3, 6
TIED = "lm_head.weight"


def _run(world_size: int, leg: Leg) -> list[LegResult]:
    results: list[LegResult] = run_ranks(run_leg, world_size, leg, timeout_s=200)
    assert all(result.losses == results[0].losses for result in results)
    return results


def _saved(results: list[LegResult]) -> dict[str, torch.Tensor]:
    return canonical([result.saved for result in results])


def _ends(results: list[LegResult]) -> dict[str, torch.Tensor]:
    return canonical([result.end for result in results])


def _assert_bitwise(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for key in left:
        assert torch.equal(left[key], right[key]), f"{key} differs"


def _assert_close(left: tuple[float, ...], right: tuple[float, ...]) -> None:
    """Two world sizes add in another order; fp32 rounding over these few steps stays below 1e-5."""
    assert left == pytest.approx(right, rel=1e-5, abs=0)


class _Unbroken:
    """Runs that nobody interrupted, each made once, by world size and dtype."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[int, str], list[LegResult]] = {}

    def get(self, world_size: int, dtype: Literal["fp32", "bf16"]) -> tuple[list[LegResult], Path]:
        """Return the results up to `LAST` and the directory of the checkpoint at `SAVED_AT`.

        What the saving ranks held at that moment is the truth for every load.
        """
        run_dir = self._folder / f"{world_size}-{dtype}"
        if (world_size, dtype) not in self._made:
            leg = Leg(save_to=str(run_dir), save_at=SAVED_AT, until=LAST, dtype=dtype)
            self._made[world_size, dtype] = _run(world_size, leg)
        return self._made[world_size, dtype], run_dir


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> _Unbroken:
    return _Unbroken(tmp_path_factory.mktemp("unbroken"))


@pytest.mark.parametrize(
    ("dtype", "partition_everything"),
    [
        pytest.param("fp32", False, id="fp32-persistent"),
        pytest.param("bf16", True, id="bf16-partitioned"),
        pytest.param("fp32", True, id="fp32-partitioned", marks=pytest.mark.slow),
        pytest.param("bf16", False, id="bf16-persistent", marks=pytest.mark.slow),
    ],
)
def test_the_same_layout_goes_on_bitwise(
    unbroken: _Unbroken, dtype: Literal["fp32", "bf16"], partition_everything: bool
) -> None:
    """Also in an engine that was trained already and keeps small parameters whole: all are gathered anew."""
    expected, run_dir = unbroken.get(2, dtype)
    leg = Leg(
        load_from=str(run_dir),
        warm=not partition_everything,
        until=LAST,
        dtype=dtype,
        partition_everything=partition_everything,
    )
    results = _run(2, leg)
    _assert_bitwise(_saved(results), _saved(expected))
    assert description_of(results) == description_of(expected)
    assert results[0].losses == expected[0].losses[SAVED_AT:]
    _assert_bitwise(_ends(results), _ends(expected))
    assert results[0].micro_steps == expected[0].micro_steps


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_4_to_3_to_4_restores_and_goes_on_bitwise(
    unbroken: _Unbroken, tmp_path: Path, dtype: Literal["fp32", "bf16"]
) -> None:
    expected, run_dir = unbroken.get(4, dtype)
    three = _run(3, Leg(load_from=str(run_dir), save_to=str(tmp_path), save_at=SAVED_AT, until=LAST, dtype=dtype))
    _assert_bitwise(_saved(three), _saved(expected))
    if dtype == "fp32":
        _assert_close(three[0].losses, expected[0].losses[SAVED_AT:])
    four = _run(4, Leg(load_from=str(tmp_path), until=LAST, dtype=dtype))
    _assert_bitwise(_saved(four), _saved(expected))
    assert four[0].losses == expected[0].losses[SAVED_AT:]
    _assert_bitwise(_ends(four), _ends(expected))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param(4, 2, id="4-to-2"),
        pytest.param(2, 4, id="2-to-4", marks=pytest.mark.slow),
        pytest.param(4, 1, id="4-to-1", marks=pytest.mark.slow),
        pytest.param(2, 6, id="2-to-6", marks=pytest.mark.slow),
    ],
)
def test_another_world_size_restores_bitwise_and_goes_on_the_same(unbroken: _Unbroken, saved: int, loaded: int) -> None:
    expected, run_dir = unbroken.get(saved, "fp32")
    results = _run(loaded, Leg(load_from=str(run_dir), until=LAST))
    _assert_bitwise(_saved(results), _saved(expected))
    assert description_of(results) == description_of(expected)
    _assert_close(results[0].losses, expected[0].losses[SAVED_AT:])


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize("offload_param", ["none", "cpu"])
def test_an_offloaded_optimizer_and_offloaded_weights_are_saved_and_restored(
    unbroken: _Unbroken, tmp_path: Path, dtype: Literal["fp32", "bf16"], offload_param: Literal["none", "cpu"]
) -> None:
    expected, run_dir = unbroken.get(4, dtype)
    leg = Leg(
        load_from=str(run_dir), save_to=str(tmp_path), save_at=SAVED_AT, until=LAST, dtype=dtype, offload="cpu",
        offload_param=offload_param,
    )  # fmt: skip
    results = _run(2, leg)
    _assert_bitwise(_saved(results), _saved(expected))
    back = _run(4, Leg(load_from=str(tmp_path), until=LAST, dtype=dtype))
    _assert_bitwise(_ends(back), _ends(expected))


def test_bf16_weights_are_the_rounded_master_weights_and_frozen_ones_come_back(unbroken: _Unbroken) -> None:
    expected, run_dir = unbroken.get(4, "bf16")
    results = _run(2, Leg(load_from=str(run_dir), dtype="bf16"))
    state = _saved(results)
    for name, weight in results[0].gathered.items():
        stored = state[f"frozen/{name}"] if name in FROZEN else state[f"fp32/{name}"].bfloat16()
        assert torch.equal(weight.view(-1), stored), name
        assert name not in FROZEN or torch.equal(weight, expected[0].gathered[name])


def test_the_manifest_names_every_tensor_once_with_its_exact_shape(unbroken: _Unbroken) -> None:
    _, run_dir = unbroken.get(4, "fp32")
    state = read_manifest(LocalStore(run_dir), SAVED_AT).state
    assert state.tensors["fp32/model.embed_tokens.weight"].shape == (VOCAB, 28)
    assert state.tied == {TIED: "model.embed_tokens.weight"}
    assert not any(key.endswith(TIED) for key in state.tensors)
    assert {key for key in state.tensors if key.startswith("frozen/")} == {f"frozen/{name}" for name in FROZEN}
    assert state.tensors["buffer/seen"].shape == (3,)
    assert not any("inv_freq" in key for key in state.tensors)
    assert state.optimizer_step == SAVED_AT
    assert [group["weight_decay"] for group in state.groups] == [0.1, 0.0]
    assert state.group_of["model.norm.weight"] == 1
    assert state.group_of["model.embed_tokens.weight"] == 0


@pytest.mark.parametrize("stage", fast_only([1, 2, 3], 1))
def test_a_state_of_other_groups_and_settings_goes_on_with_those_of_its_own_run(
    tmp_path: Path, stage: Literal[1, 2, 3]
) -> None:
    own = {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.01}
    expected = _run(2, Leg(until=2, save_to=str(tmp_path), save_at=2, one_group=own, stage=stage))
    results = _run(2, Leg(load_from=str(tmp_path), stage=stage))
    _assert_bitwise(_saved(results), _saved(expected))
    (stored,) = description_of(expected).groups
    assert {key: stored[key] for key in own} == {**own, "betas": [0.8, 0.99]}
    first, second = description_of(results).groups
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)
    assert all((group["lr"], group["betas"], group["eps"]) == (1e-2, [0.9, 0.95], 1e-8) for group in (first, second))


def test_a_checkpoint_before_the_first_step_has_no_moments_and_loads(tmp_path: Path) -> None:
    expected = _run(2, Leg(save_to=str(tmp_path), until=2))
    manifest = read_manifest(LocalStore(tmp_path), 0)
    assert manifest.state.optimizer_step == 0
    assert {key.split("/")[0] for key in manifest.state.tensors} == {"fp32", "frozen", "buffer"}
    results = _run(2, Leg(load_from=str(tmp_path), until=2))
    assert results[0].losses == expected[0].losses
    _assert_bitwise(_ends(results), _ends(expected))


@pytest.mark.slow
def test_another_precision_goes_on_from_the_same_master_weights(tmp_path: Path) -> None:
    """Both ways: what is rounded is not read, and need not be there."""
    fp32 = _saved(_run(2, Leg(save_to=str(tmp_path / "fp32"), save_at=1, until=1, all_trained=True)))
    bf16_leg = Leg(
        load_from=str(tmp_path / "fp32"), save_to=str(tmp_path / "bf16"), save_at=1, dtype="bf16", all_trained=True
    )
    bf16 = _saved(_run(3, replace(bf16_leg, stage=1)))
    assert bf16.keys() - fp32.keys() == {key.replace("fp32/", "model/") for key in fp32 if key.startswith("fp32/")}
    for key, tensor in bf16.items():
        kind, name = key.split("/", 1)
        assert torch.equal(tensor, fp32[f"fp32/{name}"].bfloat16() if kind == "model" else fp32[key]), key
    back = _saved(_run(2, Leg(load_from=str(tmp_path / "bf16"), all_trained=True)))
    _assert_bitwise(back, fp32)


def test_another_model_is_refused_on_every_rank_with_what_differs(unbroken: _Unbroken) -> None:
    _, run_dir = unbroken.get(2, "fp32")
    with pytest.raises(RankFailure) as refused:
        run_ranks(run_leg, 2, Leg(load_from=str(run_dir), num_layers=3), timeout_s=200)
    text = str(refused.value)
    assert text.count("model: it differs from the checkpoint: fp32/model.layers.2.") == 2
    assert "is not in the checkpoint" in text
    assert "resume with the model that the run started with, or set another run.name" in text
