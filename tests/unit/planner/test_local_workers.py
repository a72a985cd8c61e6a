"""Workers that do not fit on the local machine are refused with the number that fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.config import Config, load_config, parse_config
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.memory import configured_memory
from ray_ulysses.planner.memory_terms import GIB
from ray_ulysses.planner.problems import RAY_BYTES, WORKER_BYTES, gpu_problem, local_bytes, local_problem
from tests.distributed.run_case import make_config

DEMO = Path(__file__).parents[3] / "configs" / "llama-tiny_cpu_sp2-dp2_8k.yaml"


def sized(config: Config) -> tuple[Config, ModelShape]:
    assert config.model.config is not None
    return config, ModelShape.from_config_dict(config.model.config)


def tiny(workers: int, sp_size: int = 1, **overrides: Any) -> tuple[Config, ModelShape]:
    config = make_config(
        Path("/runs"), Path("/corpus"), cluster__workers=workers, parallel__sp_size=sp_size, **overrides
    )
    return sized(config)


def test_dozens_of_workers_are_refused_with_the_number_that_fits() -> None:
    config, shape = tiny(64)
    problem = local_problem(config, shape, 16 * GIB)
    assert problem is not None
    text = str(problem)
    assert text.startswith("cluster.workers=64: needs an estimated 4") and "(2.0 for Ray and 0.69 for" in text
    assert "16.0 GiB free" in text
    fitting = int(text.partition("; use ")[2].partition(" ")[0])
    assert 20 <= fitting <= 28
    assert local_problem(*tiny(fitting), 16 * GIB) is None
    assert local_problem(*tiny(fitting + 1), 16 * GIB) is not None
    # Only complete groups of sp_size workers.
    assert "; use 4 (a run" in str(local_problem(*tiny(64, 4), local_bytes(*tiny(7)) + WORKER_BYTES // 2))
    text = str(local_problem(*tiny(4, 4), RAY_BYTES + WORKER_BYTES))
    assert text.endswith("free up memory, use a smaller model or context, or use a cluster (cluster.address)")
    assert "has 0.0 GiB free" in str(local_problem(*tiny(1), -GIB))
    assert local_problem(*sized(load_config(DEMO, environment={})), 6 * GIB) is None, "the demo fits on a small laptop"


def test_the_stage_that_takes_the_most_memory_counts() -> None:
    config, shape = tiny(4, 4)
    stages = [{"name": "short", "steps": 1, "sp_size": 1}, {"name": "long"}]
    staged = parse_config({**config.model_dump(mode="json"), "stages": stages})
    alone = parse_config(config.model_dump(mode="json"), ["parallel.sp_size=1"])
    assert local_bytes(staged, shape) == local_bytes(alone, shape) > local_bytes(config, shape)
    free = (local_bytes(alone, shape) + local_bytes(config, shape)) // 2
    assert local_problem(config, shape, free) is None and local_problem(staged, shape, free) is not None


def test_the_memory_of_a_gpu_is_not_included() -> None:
    (config, shape), (on_gpu, _) = tiny(2), tiny(2, cluster__gpus_per_worker=1)
    memory, other = configured_memory(config, shape), configured_memory(on_gpu, shape)
    assert local_bytes(config, shape) == RAY_BYTES + 2 * (WORKER_BYTES + memory.host_bytes + memory.device_bytes)
    assert local_bytes(on_gpu, shape) == RAY_BYTES + 2 * (WORKER_BYTES + other.host_bytes)


@pytest.mark.parametrize(("num_gpus", "way_out"), [(0, "use 0 (CPU training)"), (3, "cluster.workers=2"), (4, None)])
def test_a_machine_with_too_few_gpus_is_refused_with_the_number_that_fits(num_gpus: int, way_out: str | None) -> None:
    config, _ = tiny(4, 2, cluster__gpus_per_worker=1)
    problem = gpu_problem(config, num_gpus)
    assert (problem is None) == (way_out is None)
    if problem is not None:
        assert problem.path == "cluster.gpus_per_worker" and way_out in str(problem)
    assert gpu_problem(tiny(4, 2)[0], 0) is None
