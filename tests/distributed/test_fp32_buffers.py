"""ZeRO engines keep a bf16 model's fp32 buffers, without DeepSpeed's own restoring."""

from __future__ import annotations

from pathlib import Path

import torch

from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.zero import build_engine, partition_config
from tests.distributed.harness import run_calls
from tests.distributed.seam_case import zero_settings
from tests.unit.attention.models import zoo_model
from tests.unit.engine.test_fp32_buffers import config_of, save_with_biases


def biases_in_engine(rank: int, world_size: int, path: str, init: str, stage: int) -> dict[str, torch.Tensor]:
    import deepspeed.runtime.engine as engine_module
    import deepspeed.runtime.zero.partition_parameters as partition_module

    for module in (engine_module, partition_module):
        module.keep_buffers_in_fp32 = lambda *_: 0
    settings = zero_settings(stage=stage, dtype="bf16")
    engine = build_engine(build_model(config_of(Path(path), init), partition_config(settings)), settings)
    found = {key: one.clone() for key, one in engine.module.named_buffers() if key.endswith("correction_bias")}
    engine.destroy()
    return found


def test_fp32_buffers_survive_every_zero_stage(tmp_path: Path) -> None:
    biases = save_with_biases(zoo_model("deepseek_v3"), tmp_path)
    calls = {
        f"{init} {stage}": (biases_in_engine, str(tmp_path), init, stage)
        for init in ("pretrained", "random")
        for stage in (1, 2, 3)
    }
    for case, ranks in run_calls(2, calls, timeout_s=60).items():
        for found in ranks:
            assert found.keys() == biases.keys()
            for key, bias in found.items():
                assert bias.dtype == torch.float32, case
                assert case.startswith("random") or torch.equal(bias, biases[key]), case
