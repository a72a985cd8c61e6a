"""The planner chooses what a configuration leaves to it, and never what it writes."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ulysses.config import Config, parse_config
from ray_ulysses.config.running import WorkerLimits
from ray_ulysses.errors import ConfigError
from ray_ulysses.planner.memory import configured_memory, fits
from ray_ulysses.planner.search import _apart, chosen_settings, with_settings
from tests.unit.planner.runs import LLAMA_3_8B, make_config, make_shape


def config_of(*, context: int = 131_072, **memory) -> Config:
    return make_config(
        LLAMA_3_8B,
        model={"config": LLAMA_3_8B, "init": "pretrained", "path": "/model"},
        data={"path": "/corpus", "context_tokens": context, "rows_per_step": 8},
        parallel={"sp_size": 8},
        cluster={"workers": 8, "gpus_per_worker": 1, "device": "H100"},
        memory=memory,
    )


def chosen(config: Config, stored: Config | None = None) -> tuple[Config, list[str]]:
    found, reasons = chosen_settings(config, make_shape(config), stored)
    return found, [str(reason) for reason in reasons]


@pytest.mark.parametrize(("context", "kept"), [(131_072, "both"), (1 << 20, "kernel"), (1 << 24, "kernel")])
def test_attention_output_is_both_where_that_fits_else_kernel(context: int, kept: str) -> None:
    found, (reason,) = chosen(config_of(context=context, device_gib=79.0))
    assert found.memory.attention_output == kept
    assert ("with both, attention outputs, kept would take" in reason) is (kept == "kernel")


def test_attention_output_without_a_limit_is_both() -> None:
    found, (reason,) = chosen(config_of(context=1 << 24))
    assert found.memory.attention_output == "both"
    assert reason == "memory.attention_output=both: the fastest; memory.device_gib is not given"


def test_what_is_chosen_fits_in_every_stage() -> None:
    config = config_of(context=393_216, device_gib=79.0)
    stages = [{"name": "wide", "steps": 1, "sp_size": 4}, {"name": "long"}]
    staged = parse_config({**config.model_dump(mode="json", exclude_unset=True), "stages": stages})
    alone = parse_config(config.model_dump(mode="json", exclude_unset=True), ["parallel.sp_size=4"])
    kept = [chosen(one)[0].memory.attention_output for one in (config, alone, staged)]
    assert kept == ["both", "kernel", "kernel"]


@pytest.mark.parametrize(
    ("sizes", "texts"), [((31.2, 15.6), ("31.2", "15.6")), ((15.004, 15.001), ("15.004", "15.001"))]
)
def test_sizes_are_told_apart(sizes: tuple[float, float], texts: tuple[str, str]) -> None:
    assert _apart(*sizes) == texts


def test_a_small_host_does_not_decide_what_is_kept_on_the_device() -> None:
    found, _ = chosen(config_of(device_gib=79.0, host_gib=5.0))
    assert found.memory.attention_output == "both"


def test_nothing_is_chosen_where_everything_is_written() -> None:
    config = config_of(attention_output="none", device_gib=79.0)
    assert chosen(config) == (config, [])


def test_what_the_file_writes_is_never_changed() -> None:
    written = {"attention_output": "none", "offload_optimizer": "cpu", "offload_activations": []}
    found, reasons = chosen(config_of(context=1 << 20, plan="auto", device_gib=79.0, host_gib=200.0, **written))
    assert found.memory.model_dump(include=set(written), mode="json") == written
    assert {reason.partition("=")[0] for reason in reasons} == {
        "memory.attention_head_groups",
        "memory.gradient_checkpointing",
        "memory.offload_param",
    }


@pytest.mark.parametrize("context", [8192, 131_072, 1 << 20])
def test_a_plan_makes_a_run_fit_and_says_why(context: int) -> None:
    config = config_of(context=context, plan="auto", device_gib=79.0, host_gib=220.0)
    found, reasons = chosen(config)
    assert fits(found, configured_memory(found, make_shape(found)))
    assert found.memory.gradient_checkpointing is (context > 8192), "the fastest that fits"
    assert bool(found.memory.offload_activations) is (context > 131_072)
    assert len(reasons) == 6


@pytest.mark.parametrize(
    ("changes", "stage"),
    [
        ({}, 1),
        ({"model.dtype": "bf16"}, 3),
        ({"cluster.workers": WorkerLimits(min=1, max=2)}, 3),
        ({"memory.offload_optimizer": "cpu"}, 3),
        ({"memory.zero_stage": 2}, 2),
    ],
    ids=str,
)
def test_one_worker_takes_stage_1_where_that_was_measured(changes: dict[str, Any], stage: int) -> None:
    alone = {"cluster.workers": WorkerLimits(min=1, max=1), "parallel.sp_size": 1, "model.dtype": "fp32"}
    assert with_settings(config_of(context=8192), alone | changes).zero_stage == stage


def test_one_worker_whose_weights_have_to_be_on_the_host_takes_stage_3() -> None:
    config = config_of(context=8192, plan="auto", device_gib=30.0, host_gib=1000.0)
    alone = {"cluster.workers": WorkerLimits(min=1, max=1), "parallel.sp_size": 1, "model.dtype": "fp32"}
    before = with_settings(config, alone)
    found, _ = chosen(before)
    assert (before.zero_stage, found.zero_stage, found.memory.offload_param) == (1, 3, "cpu")


def test_a_resume_keeps_what_was_chosen_even_if_it_would_be_chosen_differently_now() -> None:
    config = config_of(plan="auto", device_gib=79.0)
    stored, _ = chosen(config_of(context=1 << 20, plan="auto", device_gib=79.0, host_gib=220.0))
    # The stored configuration is a file between the two commands.
    stored = parse_config(stored.model_dump(mode="json"))
    assert stored.memory.offload_activations
    found, reasons = chosen(config, stored)
    assert found.memory.offload_activations == stored.memory.offload_activations
    assert all(reason.endswith("as the run has stored it") for reason in reasons)
    assert chosen(stored, stored) == (stored, []), "everything is written in it"


def test_a_resume_chooses_again_where_what_was_chosen_does_not_fit_any_more() -> None:
    stored, _ = chosen(config_of(plan="auto", device_gib=79.0))
    found, reasons = chosen(config_of(plan="auto", device_gib=24.0, host_gib=220.0), stored)
    assert fits(found, configured_memory(found, make_shape(found)))
    assert found.memory != stored.memory
    assert not any("as the run has stored it" in reason for reason in reasons)


def test_a_run_from_before_the_default_was_auto_keeps_both() -> None:
    stored = config_of(attention_output="both", context=524_288)
    found, (reason,) = chosen(config_of(context=524_288), stored)
    assert (found.memory.attention_output, reason) == (
        "both",
        "memory.attention_output=both: as the run has stored it",
    )


def test_a_plan_needs_a_limit() -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(config_of(plan="auto").model_dump(mode="json"))
    assert str(error.value).endswith(
        "memory.device_gib: memory.plan=auto needs a limit to fit; give the memory of one GPU, "
        "such as 79, or set memory.plan: off"
    )
