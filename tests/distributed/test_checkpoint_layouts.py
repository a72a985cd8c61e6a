"""A state saved at any layout loads bitwise at every other, and training goes on: the whole matrix, and a part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from ray_ulysses.checkpoint import read_manifest
from ray_ulysses.storage import LocalStore
from tests.apart import relative
from tests.breadth import fast_only
from tests.distributed.checkpoint_layouts_case import (
    FROZEN,
    LAST,
    SAVED_AT,
    VOCAB,
    Layout,
    LoadResult,
    Stage,
    can_swap,
    load_layouts,
    restore_every_step,
    save_layouts,
)
from tests.distributed.harness import RankFailure, run_ranks
from tests.result_table import ResultTable

WORLDS = (1, 2, 3, 4, 6, 8)
STAGES: tuple[Stage, ...] = (1, 2, 3)
ANOTHER_LAYOUT = 1e-5
"""Law 2: a step from the same state at another layout, fp32, relative. Two layouts add in another order."""
CHOSEN = (
    Layout(world_size=1, stage=2),
    Layout(world_size=3, keeps_small=True),
    Layout(world_size=2, sp_size=2, stage=1),
)
"""What every run of the tests covers: each stage, an odd world, shared rows."""
KINDS: dict[str, tuple[Layout, ...]] = {
    "decoder, fp32": tuple(
        Layout(world_size=world_size, sp_size=sp_size, stage=stage)
        for (world_size, sp_size), stage in product(product(WORLDS, (1, 2, 4)), STAGES)
        if world_size % sp_size == 0
    ),
    # ZeRO-1 has an optimizer class of its own here; a rank's rounded weights must reach all the others.
    "decoder, bf16": tuple(Layout(world_size=world, stage=n, dtype="bf16") for world, n in product((1, 2, 3), STAGES)),
    "adapters": tuple(
        Layout(world_size=world, stage=stage, model="adapters", dtype="bf16")
        for world, stage in product((1, 3), STAGES)
    ),
    "adapters of experts": tuple(
        Layout(world_size=world, stage=stage, model="experts") for world, stage in product((1, 2, 3), STAGES)
    ),
    "quantized": tuple(
        Layout(world_size=world, stage=stage, model="quantized", width=64)
        for world, stage in product((1, 2, 3), STAGES)
    ),
    "offload": (
        *(Layout(world_size=world, stage=n, offload="cpu") for world, n in product((1, 2, 3), STAGES)),
        *(Layout(world_size=world, offload="cpu", offload_param=True) for world in (1, 2)),
    ),
    "secondary": (
        Layout(world_size=3),
        *(Layout(world_size=world, sp_size=sp, secondary_size=2) for world, sp in ((4, 1), (4, 2), (6, 1), (8, 4))),
        Layout(world_size=8, secondary_size=4, keeps_small=True),
    ),
    "secondary, adapters": tuple(
        Layout(world_size=world, secondary_size=size, model="adapters", dtype="bf16")
        for world, size in ((2, 1), (4, 2), (6, 3))
    ),
    "on NVMe": tuple(
        Layout(world_size=world, offload=offload, dtype=dtype, width=640, sub_group_elements=300_000)
        for world, offload, dtype in product((1, 2), ("none", "nvme"), ("fp32", "bf16"))
    ),
}  # fmt: skip
Losses = dict[str, tuple[float, ...]]


def exchange_states(
    layouts: Sequence[Layout], folder: Path, timeout_s: float = 120
) -> tuple[list[list[LoadResult]], Losses]:
    """Save at every layout and load at every one; return what each rank saw of each load, and each layout's losses.

    Layouts of two precisions are two families: the frozen parameters of one are not the other's.

    Every loader goes on from its own state and from those of the first and the last layout.
    """
    by_world = {world_size: [layout for layout in layouts if layout.world_size == world_size] for world_size in WORLDS}
    losses: Losses = {}
    for world_size, held in by_world.items():
        if held:
            losses |= run_ranks(save_layouts, world_size, held, str(folder), timeout_s=timeout_s)[0]
    results: list[list[LoadResult]] = []
    for dtype in dict.fromkeys(layout.dtype for layout in layouts):
        family = [layout.label for layout in layouts if layout.dtype == dtype]
        trained = (family[0], family[-1])
        for world_size, held in by_world.items():
            loaders = [layout for layout in held if layout.dtype == dtype]
            if loaders:
                ranks = run_ranks(load_layouts, world_size, loaders, family, trained, str(folder), timeout_s=timeout_s)
                assert len(ranks[0]) == len(loaders) * len(family)
                results += [list(loads) for loads in zip(*ranks, strict=True)]
    for seen in results:
        check(seen, losses[seen[0].saver][SAVED_AT:])
    return results, losses


def check(ranks: Sequence[LoadResult], expected: tuple[float, ...]) -> None:
    """Hold one load to what was saved, on every rank, and the steps after it to the unbroken run."""
    loader, saver = ranks[0].loader, ranks[0].saver
    for rank, result in enumerate(ranks):
        assert not result.wrong, f"{saver} loaded at {loader.label}, rank {rank}: {result.wrong} differ"
        assert result.losses == ranks[0].losses
    if saver == loader.label:
        assert ranks[0].losses == expected, f"{saver} does not go on bitwise"
    elif ranks[0].losses and loader.dtype == "fp32":
        assert worst_loss(ranks[0].losses, expected) <= ANOTHER_LAYOUT, f"{saver} at {loader.label}"


def worst_loss(losses: tuple[float, ...], expected: tuple[float, ...]) -> float:
    assert len(losses) == len(expected) == LAST - SAVED_AT
    return relative(losses, expected)


@pytest.fixture(scope="module")
def whole_table() -> Iterator[ResultTable]:
    """The table of the whole matrix, written once every kind is in it."""
    table = ResultTable()
    yield table
    if {row["kind"] for row in table.rows} == {*KINDS}:
        table.write("checkpoint_layouts", "A state of any layout, loaded at any other")


def test_every_stage_and_world_loads_every_other_and_goes_on(tmp_path: Path) -> None:
    exchange_states(CHOSEN, tmp_path)
    state = read_manifest(LocalStore(tmp_path / CHOSEN[-1].label), SAVED_AT).state
    assert state.tensors["fp32/model.embed_tokens.weight"].shape == (VOCAB, 28)
    assert state.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert not any(key.endswith("lm_head.weight") or "inv_freq" in key for key in state.tensors)
    assert {key for key in state.tensors if key.startswith("frozen/")} == {f"frozen/{name}" for name in FROZEN}
    assert state.tensors["buffer/seen"].shape == (3,)
    assert state.optimizer_step == SAVED_AT


def test_a_state_does_not_depend_on_secondary_shards(tmp_path: Path) -> None:
    """Frozen weights too: the shards that their first values made are stale once a state is loaded."""
    exchange_states([Layout(world_size=2), Layout(world_size=4, secondary_size=2)], tmp_path)


@pytest.mark.slow
def test_adapters_of_experts_load_at_another_world_and_go_on(tmp_path: Path) -> None:
    layouts = [
        Layout(world_size=1, model="experts"),
        Layout(world_size=3, stage=1, model="experts"),
        Layout(world_size=2, sp_size=2, model="experts"),
    ]
    exchange_states(layouts, tmp_path)
    tensors = read_manifest(LocalStore(tmp_path / layouts[-1].label), SAVED_AT).state.tensors
    of_experts = {key for key in tensors if "experts" in key and "lora_" in key}
    assert {key.partition("/")[0] for key in of_experts} >= {"fp32"}
    assert not any(key.startswith("fp32/") and "base_layer" in key and "lora_" not in key for key in tensors)


def test_a_quantized_base_is_not_stored_and_a_state_over_it_loads_at_every_stage_and_world(tmp_path: Path) -> None:
    chosen = [replace(one, model="quantized", width=64) for one in CHOSEN]
    exchange_states(chosen, tmp_path)
    states = [read_manifest(LocalStore(tmp_path / one.label), SAVED_AT).state for one in chosen]
    assert {one.base_fingerprint for one in states} == {states[0].base_fingerprint} != {""}
    assert not any(key.startswith("frozen/") for one in states for key in one.tensors)


@pytest.mark.parametrize("stages", fast_only([(3,), (1, 2)], (3,)), ids=str)
def test_a_run_goes_on_bitwise_from_every_one_of_its_steps(tmp_path: Path, stages: tuple[Stage, ...]) -> None:
    """The first save comes before the optimizer has any moments."""
    layouts = [Layout(world_size=2, sp_size=2, stage=stage) for stage in stages]
    for results in run_ranks(restore_every_step, 2, layouts, str(tmp_path), timeout_s=150):
        assert len(results) == len(layouts) * (LAST + 1)
        assert not [(result.loader.label, result.saver, result.wrong) for result in results if result.wrong]


@pytest.mark.slow
def test_another_precision_goes_on_from_the_same_master_weights(tmp_path: Path) -> None:
    """Both ways: what is rounded is not read, and need not be there."""
    fp32, bf16 = Layout(world_size=2, model="trained"), Layout(world_size=3, stage=1, dtype="bf16", model="trained")
    for layout in (fp32, bf16):
        run_ranks(save_layouts, layout.world_size, [layout], str(tmp_path))
    for loader, saver in ((bf16, fp32), (fp32, bf16)):
        for (result,) in run_ranks(load_layouts, loader.world_size, [loader], [saver.label], (), str(tmp_path)):
            assert not result.wrong, (loader.label, result.wrong)


def test_another_model_is_refused_on_every_rank_with_what_differs(tmp_path: Path) -> None:
    small, deep = Layout(world_size=2), Layout(world_size=2, layers=3)
    run_ranks(save_layouts, 2, [small], str(tmp_path))
    with pytest.raises(RankFailure) as refused:
        run_ranks(load_layouts, 2, [deep], [small.label], (), str(tmp_path))
    assert str(refused.value).count("differs from the checkpoint: fp32/model.layers.2.") == 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_matrix_of_layouts(kind: str, tmp_path: Path, whole_table: ResultTable) -> None:
    if kind == "on NVMe" and not run_ranks(can_swap, 1, process_group=False)[0]:
        pytest.skip("DeepSpeed's async_io is not compatible with this machine: libaio or a compiler is missing")
    # The first engine with NVMe builds the op, which takes minutes.
    results, expected = exchange_states(KINDS[kind], tmp_path, timeout_s=1800)
    for loader in KINDS[kind]:
        loads = [ranks[0] for ranks in results if ranks[0].loader == loader]
        others = [load for load in loads if load.losses and load.saver != loader.label]
        worst = max((worst_loss(load.losses, expected[load.saver][SAVED_AT:]) for load in others), default=0.0)
        whole_table.add(
            {
                "kind": kind, "layout": loader.label, "states loaded bitwise": str(len(loads)),
                "went on from its own": "bitwise", "went on from others": str(len(others)),
                "largest difference of a loss": f"{worst:.1e}",
            }
        )  # fmt: skip
