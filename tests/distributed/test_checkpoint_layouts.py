"""A state saved at any layout loads bitwise at every other, and training goes on: the whole matrix, and a part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from tests.apart import relative
from tests.breadth import fast_only
from tests.distributed.checkpoint_layouts_case import (
    LAST,
    SAVED_AT,
    Dtype,
    Layout,
    LoadResult,
    Offload,
    Stage,
    can_swap,
    load_layouts,
    restore_every_step,
    save_layouts,
)
from tests.distributed.harness import run_ranks
from tests.result_table import ResultTable

pytestmark = pytest.mark.distributed

WORLDS = (1, 2, 3, 4, 6, 8)
STAGES: tuple[Stage, ...] = (1, 2, 3)
DTYPES: tuple[Dtype, ...] = ("fp32", "bf16")
WITH_CPU: tuple[Offload, ...] = ("none", "cpu")
WITH_NVME: tuple[Offload, ...] = ("none", "nvme")
ANOTHER_LAYOUT = 1e-5
"""Law 2: a step from the same state at another layout, fp32, relative. Two layouts add in another order."""

MATRIX = tuple(
    Layout(world_size=world_size, sp_size=sp_size, stage=stage)
    for world_size, sp_size, stage in product(WORLDS, (1, 2, 4), STAGES)
    if world_size % sp_size == 0
)
CHOSEN = (
    Layout(world_size=1, stage=2),
    Layout(world_size=2, sp_size=2, stage=1),
    Layout(world_size=2, stage=3),
    Layout(world_size=3, stage=3),
    Layout(world_size=4, sp_size=2, stage=2),
)
"""What every run of the tests covers: each stage, an odd world, shared rows."""

BF16 = tuple(Layout(world_size=world_size, stage=stage, dtype="bf16") for world_size, stage in product(WORLDS, STAGES))
ADAPTERS = tuple(
    Layout(world_size=world_size, sp_size=sp_size, stage=stage, model="adapters", dtype=dtype)
    for (world_size, sp_size), stage, dtype in product(((1, 1), (3, 1), (4, 2)), STAGES, DTYPES)
)
OFFLOADED = tuple(
    Layout(world_size=world_size, stage=stage, offload=offload, dtype=dtype)
    for world_size, stage, offload, dtype in product((1, 2, 3), STAGES, WITH_CPU, DTYPES)
)
ON_NVME = tuple(
    Layout(world_size=world_size, offload=offload, dtype=dtype, width=640, sub_group_elements=300_000)
    for world_size, offload, dtype in product((1, 2), WITH_NVME, DTYPES)
)


KINDS = {"decoder, fp32": MATRIX, "decoder, bf16": BF16, "adapters": ADAPTERS, "offload": OFFLOADED}
NVME, EVERY_STEP = "on NVMe", "restored at every step"
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


def take_down(kind: str, results: Sequence[Sequence[LoadResult]], expected: Losses, table: ResultTable) -> None:
    """Add a row for each layout: what it loaded, and how it went on."""
    for loader in dict.fromkeys(ranks[0].loader for ranks in results):
        loads = [ranks[0] for ranks in results if ranks[0].loader == loader]
        others = [load for load in loads if load.losses and load.saver != loader.label]
        worst = max((worst_loss(load.losses, expected[load.saver][SAVED_AT:]) for load in others), default=0.0)
        table.add(
            {
                "kind": kind,
                "layout": loader.label,
                "states loaded bitwise": str(len(loads)),
                "went on from its own": "bitwise",
                "went on from others": str(len(others)),
                "largest difference of a loss": f"{worst:.1e}",
            }
        )


@pytest.fixture(scope="module")
def whole_table() -> Iterator[ResultTable]:
    """The table of the whole matrix, written once every kind is in it."""
    table = ResultTable()
    yield table
    if {row["kind"] for row in table.rows} == {*KINDS, NVME, EVERY_STEP}:
        table.write("checkpoint_layouts", "A state of any layout, loaded at any other")


def test_every_stage_and_world_loads_every_other_and_goes_on(tmp_path: Path) -> None:
    exchange_states(CHOSEN, tmp_path)


@pytest.mark.slow
def test_bf16_weights_follow_the_master_weights_in_every_stage(tmp_path: Path) -> None:
    """ZeRO-1 has an optimizer class of its own here; a rank's rounded weights must reach all the others."""
    exchange_states([Layout(world_size=2, stage=stage, dtype="bf16") for stage in STAGES], tmp_path)


@pytest.mark.slow
def test_an_optimizer_on_the_host_is_restored(tmp_path: Path) -> None:
    exchange_states([Layout(world_size=2, stage=stage, offload="cpu") for stage in STAGES], tmp_path)


@pytest.mark.slow
def test_adapters_over_a_frozen_base_are_restored(tmp_path: Path) -> None:
    layouts = [Layout(world_size=world_size, stage=2, model="adapters", dtype="bf16") for world_size in (1, 2)]
    exchange_states([*layouts, replace(layouts[-1], stage=3)], tmp_path)


@pytest.mark.parametrize("stages", fast_only([(3,), (1, 2)], (3,)), ids=str)
def test_a_run_goes_on_bitwise_from_every_one_of_its_steps(tmp_path: Path, stages: tuple[Stage, ...]) -> None:
    """The first save comes before the optimizer has any moments."""
    layouts = [Layout(world_size=2, sp_size=2, stage=stage) for stage in stages]
    for results in run_ranks(restore_every_step, 2, layouts, str(tmp_path), timeout_s=150):
        assert len(results) == len(layouts) * (LAST + 1)
        assert not [(result.loader.label, result.saver, result.wrong) for result in results if result.wrong]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_matrix_of_layouts(kind: str, tmp_path: Path, whole_table: ResultTable) -> None:
    results, losses = exchange_states(KINDS[kind], tmp_path, timeout_s=1200)
    take_down(kind, results, losses, whole_table)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_optimizer_on_nvme_is_saved_and_restored_sub_group_by_sub_group(
    tmp_path: Path, whole_table: ResultTable
) -> None:
    if not run_ranks(can_swap, 1, process_group=False)[0]:
        pytest.skip("DeepSpeed's async_io is not compatible with this machine: libaio or a compiler is missing")
    # The first engine builds it, which takes minutes.
    results, losses = exchange_states(ON_NVME, tmp_path, timeout_s=1800)
    take_down(NVME, results, losses, whole_table)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_layout_goes_on_bitwise_from_every_one_of_its_steps(tmp_path: Path, whole_table: ResultTable) -> None:
    for world_size in WORLDS:
        layouts = [layout for layout in (*MATRIX, *BF16, *ADAPTERS, *OFFLOADED) if layout.world_size == world_size]
        layouts = list(dict.fromkeys(layouts))
        ranks = run_ranks(restore_every_step, world_size, layouts, str(tmp_path), timeout_s=1200)
        for results in ranks:
            assert len(results) == len(layouts) * (LAST + 1)
            assert not [(result.loader.label, result.saver, result.wrong) for result in results if result.wrong]
        for layout in layouts:
            whole_table.add(
                {
                    "kind": EVERY_STEP,
                    "layout": layout.label,
                    "states loaded bitwise": str(LAST + 1),
                    "went on from its own": "bitwise, from every step",
                    "went on from others": "0",
                    "largest difference of a loss": "0.0e+00",
                }
            )
