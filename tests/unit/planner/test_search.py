"""The settings that the planner proposes fit by its own estimate, and no cheaper settings fit."""

from __future__ import annotations

import random
from operator import attrgetter
from typing import Any

import pytest

from ray_ulysses.config import Config, parse_config
from ray_ulysses.config.rules import broken_rules
from ray_ulysses.config.schema import with_settings
from ray_ulysses.config.stages import stage_config, stage_configs
from ray_ulysses.planner import memory as planned_memory
from ray_ulysses.planner.memory import MemoryEstimate, configured_memory, fits, run_memory
from ray_ulysses.planner.memory_terms import GIB, MemoryTerm
from ray_ulysses.planner.search import (
    fastest,
    fits_with,
    leaner,
    leanest,
    longest_context,
    longest_contexts,
    nearest,
    product,
    reasons,
)
from ray_ulysses.planner.settings import pad_multiple
from ray_ulysses.planner.throughput import configured_time, full_rows
from tests.breadth import fast_only
from tests.unit.planner.runs import llama_config, make_shape


def config_of(context: int = 131_072, *, sp_size: int = 4, workers: Any = 8, **memory: Any) -> Config:
    limits = {"device_gib": 79.0, "host_gib": 200.0, "attention_output": "both"}
    return llama_config(context, sp_size=sp_size, workers=workers, device="H100", **limits | memory)


def staged(*stages: dict[str, Any], **settings: Any) -> Config:
    tree = config_of(**settings).model_dump(mode="json", exclude_unset=True)
    named = [{"name": f"stage{number}", **stage} for number, stage in enumerate(stages)]
    tree["stages"] = [{"steps": 9, **one} for one in named[:-1]] + named[-1:]
    return parse_config(tree)


def pasted(config: Config, options: list[str]) -> Config:
    return parse_config(
        config.model_dump(mode="json"), [option.removeprefix("--set ").strip("'") for option in options]
    )


def does_fit(config: Config) -> bool:
    return fits(config, configured_memory(config, make_shape(config)))


def drawn_configs() -> list[Config]:
    draw = random.Random(7)
    return [
        config_of(
            sp_size=draw.choice([1, 2, 4, 8]),
            workers=draw.choice([8, 16, 32]),
            context=draw.choice([32, 131, 262, 524, 1048, 2097]) * 1024,
            device_gib=draw.choice([24.0, 40.0, 79.0]),
            host_gib=draw.choice([30.0, 100.0, 220.0, None]),
            zero_stage=draw.choice([2, 3]),
            loss_tile=draw.choice(["off", "auto", 2048]),
            mlp_tile=draw.choice(["off", "auto"]),
            offload_optimizer=draw.choice(["none", "cpu"]),
            offload_activations=draw.choice([[], ["layer_inputs"]]),
        )
        for _ in range(24)
    ]


DRAWN = drawn_configs()


@pytest.mark.parametrize("number", fast_only(range(24), 0, 10, 20))
def test_the_nearest_setting_fits_when_it_is_pasted_and_none_of_its_changes_is_superfluous(number: int) -> None:
    config = DRAWN[number]
    shape = make_shape(config)
    near = nearest(config, shape)
    if near is None:
        assert not any(fits_with(config, shape, one.settings) for one in leaner(config, shape))
        return
    options = [change.option() for change in near.changes]
    assert does_fit(pasted(config, options))
    assert near.changes or does_fit(config)
    for left_out in options:
        rest = {one.path: attrgetter(one.path)(near.config) for one in near.changes if one.option() != left_out}
        assert not fits_with(config, shape, rest), f"{left_out} is superfluous"
    for change in near.changes:
        assert change.after < change.before


def test_the_nearest_setting_is_the_cheapest_of_all_that_fit() -> None:
    config = config_of(context=1 << 20)
    shape = make_shape(config)
    near = nearest(config, shape)
    assert near is not None
    all_of_them = [one for one in leaner(config, shape) if fits_with(config, shape, one.settings)]
    best = min(all_of_them, key=lambda one: one.cost)
    assert {change.path for change in near.changes} == set(best.settings)
    assert with_settings(config, best.settings) == near.config


def test_compiled_layers_are_given_up_for_settings_that_exclude_them() -> None:
    config = config_of(sp_size=8, gradient_checkpointing=False, zero_stage=2)
    compiled = with_settings(config, {"model.compile": True})
    shape = make_shape(config)
    wanted, near = nearest(config, shape), nearest(compiled, shape)
    assert wanted is not None and near is not None and not broken_rules(near.config)
    assert {change.path for change in near.changes} == {"model.compile", *(change.path for change in wanted.changes)}


def test_an_automatic_stage_gives_way_to_leaner_ones_than_it_stands_for() -> None:
    sharded = config_of(sp_size=8)
    alone = with_settings(config_of(sp_size=1, workers=1), {"model.dtype": "fp32"})
    for config, stage, wanted in ((sharded, 3, {"auto"}), (alone, 1, {"auto", 2, 3})):
        assert config.zero_stage == stage and config.memory.zero_stage == "auto"
        values = {one.settings.get("memory.zero_stage", "auto") for one in leaner(config, make_shape(config))}
        assert values == wanted


@pytest.mark.parametrize(
    ("workers", "option"),
    [(8, "cluster.workers=16"), ({"min": 8, "max": 32}, "'cluster.workers={min: 16, max: 32}'")],
    ids=["fixed", "elastic"],
)
def test_more_workers_are_proposed_only_if_no_settings_fit(workers: Any, option: str) -> None:
    config = config_of(context=8 << 20, workers=workers)
    shape = make_shape(config)
    assert not any(fits_with(config, shape, one.settings) for one in leaner(config, shape))
    near = nearest(config, shape)
    assert near is not None and near.changes[0].option() == f"--set {option}"
    assert does_fit(pasted(config, [change.option() for change in near.changes]))


def test_the_least_need_is_that_of_the_stage_that_needs_the_most() -> None:
    config = staged({"sp_size": 1}, {}, sp_size=8, device_gib=12.0, mlp_tile="auto", loss_tile="auto", host_gib=None)
    shape = make_shape(config)
    least = leanest(config, shape)
    first, last = (configured_memory(own, shape).device_bytes for own in stage_configs(least.config))
    assert least.memory.device_bytes == first > 12 * GIB > last


def test_a_change_is_explained_by_the_memory_of_the_stage_that_needs_it() -> None:
    config = staged({"sp_size": 1}, {}, sp_size=8)
    shape = make_shape(config)
    (change,) = reasons(config, shape, {"data.context_tokens": 65_536})
    first, shorter = (
        {term.name: term.bytes for term in configured_memory(stage_config(one, 0), shape).device}
        for one in (config, with_settings(config, {"data.context_tokens": 65_536}))
    )
    assert (change.before, change.after) == (first[change.term], shorter[change.term])
    assert change.after == change.before // 2


@pytest.mark.parametrize("number", fast_only(range(12), 0, 10))
def test_the_longest_context_fits_and_a_multiple_more_does_not(number: int) -> None:
    config = DRAWN[number]
    shape, multiple = make_shape(config), pad_multiple(config, make_shape(config))
    longest = longest_context(config, shape)
    assert longest % multiple == 0
    assert not longest or does_fit(with_settings(config, {"data.context_tokens": longest}))
    assert not does_fit(with_settings(config, {"data.context_tokens": longest + multiple}))


def test_no_setting_reaches_further_than_the_longest_context_with_changes() -> None:
    config = config_of()
    shape = make_shape(config)
    lengths = longest_contexts(config, shape)
    assert lengths.changed is not None
    longest = lengths.changed.config.data.context_tokens
    assert longest > lengths.configured == longest_context(config, shape)
    assert does_fit(pasted(lengths.changed.config, []))
    longer = {"data.context_tokens": longest + lengths.multiple}
    assert not any(fits_with(config, shape, {**one.settings, **longer}) for one in leaner(config, shape))


def test_no_longest_context_is_shorter_than_that_of_a_stage() -> None:
    short, changed_alone = 65_536, 524_288
    config = staged({"context_tokens": short}, {}, sp_size=8, device_gib=40.0)
    shape = make_shape(config)
    assert longest_context(config, shape) > short
    tiles = {"mlp_tile": "auto", "loss_tile": "auto"}
    stage = {"context_tokens": changed_alone}
    config = staged(stage, {}, context=2 * changed_alone, sp_size=8, device_gib=24.0, **tiles)
    lengths = longest_contexts(config, shape)
    assert lengths.configured == 0, "as configured, this stage does not fit"
    assert lengths.changed is not None and lengths.changed.config.data.context_tokens > changed_alone
    assert [*broken_rules(lengths.changed.config)] == []
    config = staged({"context_tokens": 4096}, {"context_tokens": 65_500})
    lengths = longest_contexts(config, make_shape(config))
    assert lengths.configured == -(-65_500 // lengths.multiple) * lengths.multiple
    assert lengths.changed is not None and lengths.changed.changes == ()


def test_the_fastest_is_the_one_with_the_least_modelled_time() -> None:
    config = config_of(sp_size=8, context=1 << 20)
    shape = make_shape(config)
    options = {
        "memory.attention_output": {"both": 0, "kernel": 2, "none": 16},
        "memory.offload_activations": {(): 0, ("layer_inputs",): 5, ("layer_inputs", "attention_outputs"): 6},
        "memory.offload_optimizer": {"none": 0, "cpu": 8},
    }
    found = fastest(config, shape, options)
    assert found is not None and fits_with(config, shape, found)

    def seconds(settings) -> float:
        changed = with_settings(config, settings)
        time = configured_time(changed, shape, full_rows(changed))
        assert time is not None
        return time.seconds

    fitting = [one for one in product(options) if fits_with(config, shape, one.settings)]
    assert seconds(found) <= 1.001 * min(seconds(one.settings) for one in fitting)
    assert found["memory.attention_output"] == "both"


def test_the_device_and_the_host_of_a_run_may_be_fullest_in_different_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory_of(own: Config, shape: object) -> MemoryEstimate:
        on_device = own.data.context_tokens
        device, host = (
            MemoryTerm(name="all", bytes=taken, phase="always", source="") for taken in (on_device, 9999 - on_device)
        )
        return MemoryEstimate(device=(device,), host=(host,))

    monkeypatch.setattr(planned_memory, "configured_memory", memory_of)
    config = staged({"context_tokens": 1024}, {"context_tokens": 4096})
    memory = run_memory(config, make_shape(config))
    assert (memory.device_bytes, memory.host_bytes) == (4096, 9999 - 1024)
