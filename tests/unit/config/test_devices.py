from __future__ import annotations

from pathlib import Path

import pytest

from ray_ulysses.config import parse_config
from ray_ulysses.config.devices import DEVICES, device_of
from ray_ulysses.errors import ConfigError
from tests.unit.planner.runs import llama_config

OWN = {"name": "V100", "tflops": 125.0, "gib": 31.0, "gbps": 900.0}


@pytest.mark.parametrize("device", [*DEVICES, OWN], ids=str)
def test_a_device_is_written_as_it_was_given_and_limits_the_memory(device: str | dict[str, object]) -> None:
    config = llama_config(device=device)
    written = config.model_dump(mode="json")
    assert written["cluster"]["device"] == device and parse_config(written) == config
    gpu = config.gpu
    assert gpu is not None and config.device_gib == gpu.gib
    assert (gpu.source == "cluster.device") is isinstance(device, dict)
    assert llama_config(device=device, device_gib=5.0).device_gib == 5.0
    on_cpu = config.model_copy(update={"cluster": config.cluster.model_copy(update={"gpus_per_worker": 0})})
    assert on_cpu.gpu is None and on_cpu.device_gib is None


@pytest.mark.parametrize(
    ("option", "path"),
    [
        ("cluster.device=V100", "cluster.device"),
        ("cluster.device=[A100]", "cluster.device"),
        ("cluster.device={name: V100, tflops: 125, gib: 31}", "cluster.device.gbps"),
        ("cluster.device={name: V100, tflops: 0, gib: 31, gbps: 900}", "cluster.device.tflops"),
    ],
)
def test_an_unknown_device_needs_all_figures(option: str, path: str) -> None:
    tree = llama_config().model_dump(mode="json", exclude_unset=True)
    with pytest.raises(ConfigError) as refused:
        parse_config(tree, [option])
    (problem,) = refused.value.problems
    assert problem.path == path
    assert path != "cluster.device" or (all(name in problem.rule for name in DEVICES) and "tflops" in problem.hint)


@pytest.mark.parametrize(
    ("cuda_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_a_device_is_found_by_the_name_that_cuda_gives_it(cuda_name: str, name: str | None) -> None:
    found = device_of(cuda_name)
    assert (found and found.name) == name


def test_the_docs_have_the_figures_of_each_known_device() -> None:
    page = (Path(__file__).parents[3] / "docs/scale-out.md").read_text(encoding="utf-8")
    rows = [
        f"| [{one.name}]({one.source}) | {one.tflops:g} | {one.gib:g} | {one.gbps:,.0f} | "
        f"{one.link_gbps:g}, {one.host_gbps:g} |"
        for one in DEVICES.values()
    ]
    assert "\n".join(rows) in page
