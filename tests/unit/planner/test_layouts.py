"""Layouts are compared by predicted time, with the traffic between nodes on the configured network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from ray_ulysses.config import Config
from ray_ulysses.config.schema import with_settings
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.layouts import compare_layouts
from ray_ulysses.planner.memory import configured_memory, fits
from ray_ulysses.planner.notes import plan_notes
from ray_ulysses.planner.search import chosen_settings, leaner
from ray_ulysses.planner.settings import fits_rows, plan_settings, run_layout
from tests.unit.planner.runs import LLAMA_3_8B, make_config

SHAPE = ModelShape.from_config_dict(LLAMA_3_8B)


def config_on(gbps: float, sp_size: int = 32, context: int = 524_288, **cluster: Any) -> Config:
    return make_config(
        LLAMA_3_8B,
        model={"config": LLAMA_3_8B, "init": "pretrained", "path": "/model"},
        data={"context_tokens": context, "rows_per_step": 32},
        parallel={"sp_size": sp_size},
        memory={"device_gib": 79, "attention_output": "both"},
        cluster={"workers": 32, "gpus_per_worker": 1, "device": "H100", "network_gbps": gbps, **cluster},
    )


@pytest.mark.parametrize("gbps", [10.0, 100.0, 400.0])
def test_every_layout_fits_and_the_fastest_is_first(gbps: float) -> None:
    config = config_on(gbps)
    found = compare_layouts(config, SHAPE)
    assert all(fits(one.config, configured_memory(one.config, SHAPE)) for one in found)
    seconds = [float(f"{one.time.seconds:.3g}") for one in found]
    assert seconds == sorted(seconds)
    assert [one.layout.sp_size for one in found if not one.settings] == [32]
    keys = [(one.layout.sp_size, one.layout.ring_size, one.config.memory.zero_secondary) for one in found]
    assert len(set(keys)) == len(keys)


def test_on_a_slow_network_the_exchange_of_heads_stays_within_a_node() -> None:
    config = config_on(50.0)
    found = compare_layouts(config, SHAPE)
    fastest, now = found[0], next(one for one in found if not one.settings)
    assert fastest.layout.ulysses_size <= 8
    assert fastest.reason(now).startswith("exchange of heads ")
    (note,) = [note for note in plan_notes(config, SHAPE, None) if "faster layout" in note]
    assert fastest.options() in note
    changed = [option.split("=") for option in fastest.options().split() if option != "--set"]
    assert {path: str(value) for path, value in fastest.settings.items()} == dict(changed)


def test_secondary_shards_win_where_gathering_weights_binds() -> None:
    # Few tokens per gather: the weights' traffic does not hide behind compute.
    config = config_on(25.0, sp_size=1, context=4096)
    fastest = compare_layouts(config, SHAPE)[0]
    assert fastest.settings == {"memory.zero_secondary": "node"}
    fast = config_on(400.0, sp_size=1, context=65_536)
    assert compare_layouts(fast, SHAPE)[0].config.memory.zero_secondary == "none"


def test_a_run_on_one_node_gets_no_note_and_no_secondary_shards() -> None:
    config = config_on(10.0, sp_size=8, workers=8)
    assert {one.config.memory.zero_secondary for one in compare_layouts(config, SHAPE)} == {"none"}
    assert not [note for note in plan_notes(config, SHAPE, None) if "faster layout" in note]


def test_only_allowed_sizes_are_compared() -> None:
    config = config_on(400.0, sp_size=8)
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"allowed_sp": (4, 8)})})
    assert {one.layout.sp_size for one in compare_layouts(config, SHAPE)} <= {4, 8}
    assert compare_layouts(config_on(400.0, device=None), SHAPE) == ()


def test_a_ring_that_spans_nodes_is_as_slow_as_its_slowest_hop() -> None:
    ring = {"parallel.sp_size": 16, "parallel.ring_size": 2}
    slow, fast = (
        {tuple(one.settings.items()): one for one in compare_layouts(config_on(gbps), SHAPE)}[tuple(ring.items())]
        for gbps in (1.0, 400.0)
    )
    terms = [{term.name: term for term in one.time.terms} for one in (slow, fast)]
    assert "ring" in terms[0] and "ring" not in terms[1]
    # 524,288 / 16 tokens per rank and row, 32 rows on 2 groups, 32 layers, 8 KV heads of 128 keys and values, 8 bytes.
    size = 524_288 / 16 * 16 * 32 * 8 * 256 * 8
    seconds = size / (0.8 * 1e9 / 8) - next(term.seconds for term in slow.time.terms if term.name == "attention")
    assert terms[0]["ring"].seconds == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("multiple", [8, 32, 64])
def test_a_run_that_has_begun_is_proposed_only_layouts_that_its_rows_allow(multiple: int) -> None:
    config = config_on(50.0)
    settled = replace(plan_settings(config, SHAPE), pad_multiple=multiple)
    found, of_new = compare_layouts(config, SHAPE, settled), compare_layouts(config, SHAPE)
    assert found and all(fits_rows(one.config, SHAPE, multiple) for one in found)
    kept = [one.settings for one in of_new if fits_rows(one.config, SHAPE, multiple)]
    assert [one.settings for one in found] == kept
    assert (len(kept) < len(of_new)) == (multiple < 64), "a ring of 32 ranks needs row lengths divisible by 64"
    for choices, one in ((found, settled), (of_new, None)):
        notes = [note for note in plan_notes(config, SHAPE, None, settled=one) if "faster layout" in note]
        assert len(notes) == (choices is of_new or multiple > 8), "lengths divisible only by 8 fit no 32 ranks"
        assert all(f"fits: {choices[0].options()} (" in note for note in notes)


def test_a_configured_ring_is_compared_with_the_same_rings_as_without_it() -> None:
    config = config_on(50.0)
    ringed = with_settings(config, {"parallel.ring_size": 2})
    sizes, of_ringed = (
        {(one.layout.sp_size, one.layout.ring_size) for one in compare_layouts(each, SHAPE)}
        for each in (config, ringed)
    )
    assert (32, 1) in sizes and (32, 4) in sizes
    assert of_ringed == sizes | {(32, 2)}


def test_the_search_for_memory_has_the_layouts_of_the_comparison() -> None:
    config = config_on(400.0, sp_size=4, context=65_536, gpus_per_node=2)

    def layouts(changed: Iterable[Config]) -> set[tuple[int, int]]:
        found = [run_layout(one, SHAPE) for one in changed]
        return {(one.sp_size, one.ring_size) for one in found if one.sp_size >= 4}

    compared = layouts(one.config for one in compare_layouts(config, SHAPE, plan_settings(config, SHAPE)))
    assert (4, 2) in compared, "with a ring of 2, the exchange of heads stays within a node of 2"
    assert compared == layouts(with_settings(config, one.settings) for one in leaner(config, SHAPE))


def test_a_run_that_has_begun_keeps_the_memory_settings_that_the_planner_chose() -> None:
    small = with_settings(config_on(400.0, sp_size=8, context=1_048_576), {"memory.plan": "auto"})
    stored, _ = chosen_settings(small, SHAPE, None)
    roomy = with_settings(small, {"memory.device_gib": 500.0})
    assert stored.memory.offload_activations
    kept, anew = (
        next(one for one in compare_layouts(roomy, SHAPE, stored=run) if not one.settings) for run in (stored, None)
    )
    assert kept.config.memory.offload_activations == stored.memory.offload_activations
    assert not anew.config.memory.offload_activations
