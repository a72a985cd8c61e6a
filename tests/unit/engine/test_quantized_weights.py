"""Quantized checkpoints are dequantized while they are loaded, bitwise as Transformers does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ray_ulysses.config import Config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.model import build_model
from tests.breadth import fast_only
from tests.unit.config.trees import small_tree
from tests.unit.engine.quantized_checkpoints import QUANTIZED, dequantized_by_transformers, write_checkpoint


def config_of(directory: Path, name: str, dtype: str = "bf16", **changes: Any) -> Config:
    part = "text" if QUANTIZED[name][0] == "qwen3_vl" else "whole"
    model = {"init": "pretrained", "path": str(directory), "dtype": dtype, "part": part}
    return parse_config({**small_tree(**changes), "model": model})


@pytest.mark.parametrize("dtype", fast_only(["bf16", "fp32"], "bf16"))
@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_equal_bitwise_those_that_transformers_dequantizes(tmp_path: Path, name: str, dtype: str) -> None:
    write_checkpoint(tmp_path, name)
    model = build_model(config_of(tmp_path, name, dtype))
    wanted = dequantized_by_transformers(tmp_path, name, {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    state = model.state_dict()
    assert state.keys() == wanted.keys() or QUANTIZED[name][0] == "qwen3_vl" and state.keys() < wanted.keys()
    for key, tensor in state.items():
        assert tensor.dtype == wanted[key].dtype and torch.equal(tensor, wanted[key]), key
    assert not hasattr(model.config, "quantization_config")
