"""The planner chooses settings that the configuration does not set, and never changes those that it sets."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ulysses.config import Config, parse_config
from ray_ulysses.config.running import WorkerLimits
from ray_ulysses.config.schema import with_settings
from ray_ulysses.errors import ConfigError
from ray_ulysses.planner.memory import configured_memory, fits
from ray_ulysses.planner.search import chosen_settings
from tests.unit.planner.runs import llama_config, make_shape

ONE_WORKER = {"cluster.workers": WorkerLimits(min=1, max=1), "parallel.sp_size": 1, "model.dtype": "fp32"}


def config_of(context: int = 131_072, device: str | None = "H100", **memory: Any) -> Config:
    return llama_config(context, device=device, **memory)


def chosen(config: Config, stored: Config | None = None) -> tuple[Config, list[str]]:
    found, reasons = chosen_settings(config, make_shape(config), stored)
    return found, [str(reason) for reason in reasons]


@pytest.mark.parametrize(
    ("context", "limits", "kept"),
    [
        (131_072, {"device_gib": 79.0}, "both"),
        (1 << 20, {"device_gib": 79.0}, "kernel"),
        (1 << 20, {}, "kernel"),
        (1 << 20, {"device": "H200"}, "both"),
        (1 << 24, {"device": None}, "both"),
        (131_072, {"device_gib": 79.0, "host_gib": 5.0}, "both"),
    ],
    ids=["fits", "long", "of-the-device", "of-a-larger-device", "no-limit", "small-host"],
)
def test_attention_output_is_both_where_that_fits_on_the_device_else_kernel(
    context: int, limits: dict[str, Any], kept: str
) -> None:
    found, (reason,) = chosen(config_of(context, **limits))
    assert found.memory.attention_output == kept
    assert reason.startswith(f"memory.attention_output={kept}: ")
    assert ("with both, attention outputs, kept would take" in reason) is (kept == "kernel")


def test_a_choice_fits_in_every_stage() -> None:
    config = config_of(393_216, device_gib=79.0)
    stages = [{"name": "wide", "steps": 1, "sp_size": 4}, {"name": "long"}]
    staged = parse_config({**config.model_dump(mode="json", exclude_unset=True), "stages": stages})
    alone = parse_config(config.model_dump(mode="json", exclude_unset=True), ["parallel.sp_size=4"])
    kept = [chosen(one)[0].memory.attention_output for one in (config, alone, staged)]
    assert kept == ["both", "kernel", "kernel"]


def test_a_written_setting_is_never_changed() -> None:
    written = {"attention_output": "none", "offload_optimizer": "cpu", "offload_activations": []}
    found, reasons = chosen(config_of(1 << 20, plan="auto", device_gib=79.0, host_gib=200.0, **written))
    assert found.memory.model_dump(include=set(written), mode="json") == written
    assert {reason.partition("=")[0] for reason in reasons} == {
        "memory.attention_head_groups",
        "memory.gradient_checkpointing",
        "memory.offload_param",
    }
    config = config_of(attention_output="none", device_gib=79.0)
    assert chosen(config) == (config, [])


@pytest.mark.parametrize("context", [8192, 131_072, 1 << 20])
def test_a_plan_makes_a_run_fit(context: int) -> None:
    found, reasons = chosen(config_of(context, plan="auto", device_gib=79.0, host_gib=220.0))
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
        ({"memory.zero_stage": 2}, 2),
    ],
    ids=["fp32", "bf16", "elastic", "written"],
)
def test_one_worker_takes_stage_1_in_fp32(changes: dict[str, Any], stage: int) -> None:
    assert with_settings(config_of(8192), ONE_WORKER | changes).zero_stage == stage
    # Weights can be offloaded to the host only at stage 3.
    before = with_settings(config_of(8192, plan="auto", device_gib=30.0, host_gib=1000.0), ONE_WORKER)
    found, _ = chosen(before)
    assert (before.zero_stage, found.zero_stage, found.memory.offload_param) == (1, 3, "cpu")


def test_a_resume_keeps_its_choices_as_long_as_they_fit() -> None:
    stored, _ = chosen(config_of(1 << 20, plan="auto", device_gib=79.0, host_gib=220.0))
    stored = parse_config(stored.model_dump(mode="json"))
    assert stored.memory.offload_activations
    found, reasons = chosen(config_of(plan="auto", device_gib=79.0), stored)
    assert found.memory.offload_activations == stored.memory.offload_activations
    assert all(reason.endswith("stored with the run") for reason in reasons)
    assert chosen(stored, stored) == (stored, []), "the stored file sets everything"
    small = config_of(plan="auto", device_gib=24.0, host_gib=220.0)
    found, reasons = chosen(small, chosen(config_of(plan="auto", device_gib=79.0))[0])
    assert fits(found, configured_memory(found, make_shape(found)))
    assert not any("stored with the run" in reason for reason in reasons)


def test_a_plan_needs_a_limit() -> None:
    with pytest.raises(ConfigError, match=r"memory\.device_gib: memory\.plan=auto requires a memory limit"):
        parse_config(config_of(device=None, plan="auto").model_dump(mode="json"))
